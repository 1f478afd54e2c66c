//! Why an attachment ended, and how soon it is worth another try.

use splitrail_kv::HASH_LAYOUT;
use splitrail_proto::v1::Welcome;
use tonic::Code;

use crate::mirror::Disagreement;

/// The protocol that is spoken.
pub(crate) const PROTOCOL: u32 = 1;

/// Why the shim does not go on with a router.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Another protocol.
    #[error("the router speaks version {0} of the protocol")]
    Protocol(u32),
    /// Another way of hashing.
    #[error("the router hashes blocks in layout {0}, the shim in {HASH_LAYOUT}")]
    HashLayout(u32),
    /// Blocks of another size than the engine's.
    #[error("the router's block_size is {router}, the engine's {engine}")]
    BlockSize {
        /// What the router says.
        router: u32,
        /// What the engine is known to have.
        engine: u32,
    },
    /// Other terms than those of other routers.
    #[error(transparent)]
    Terms(#[from] Disagreement),
}

impl Refusal {
    /// Whether a welcome can be accepted, by itself.
    pub(crate) fn check(welcome: &Welcome, engine_block_size: Option<u32>) -> Result<(), Self> {
        if welcome.protocol != PROTOCOL {
            return Err(Self::Protocol(welcome.protocol));
        }
        if welcome.hash_layout != HASH_LAYOUT {
            return Err(Self::HashLayout(welcome.hash_layout));
        }
        let router = welcome.block_size;
        match engine_block_size {
            Some(engine) if engine != router => Err(Self::BlockSize { router, engine }),
            None if router == 0 => Err(Self::BlockSize { router, engine: 0 }),
            _ => Ok(()),
        }
    }
}

/// How a stream, or the attempt at one, ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum Ended {
    #[error("cannot read the token: {0}")]
    Token(std::io::Error),
    #[error("cannot read the certificates: {0}")]
    Certificates(std::io::Error),
    #[error("TLS cannot be set up: {0}")]
    Tls(tonic::transport::Error),
    #[error("cannot connect: {0}")]
    Connect(String),
    #[error("no welcome in time")]
    NoWelcome,
    #[error("the router's first message is no welcome")]
    NotWelcome,
    #[error(transparent)]
    Refused(#[from] Refusal),
    #[error("{:?}: {}", .0.code(), .0.message())]
    Status(Box<tonic::Status>),
    #[error("the router ended the stream")]
    Closed,
    #[error("the router takes nothing of what it asked for")]
    Stalled,
    #[error("another stream to the same router has taken this one's place")]
    Superseded,
}

impl Ended {
    /// Whether the next try is likely to end the same way, unless somebody does something.
    pub(super) fn is_for_good(&self) -> bool {
        match self {
            Self::Token(_) | Self::Certificates(_) | Self::Tls(_) => true,
            Self::NotWelcome | Self::Refused(_) => true,
            Self::Status(status) => matches!(
                status.code(),
                Code::Unauthenticated
                    | Code::PermissionDenied
                    | Code::NotFound
                    | Code::FailedPrecondition
                    | Code::InvalidArgument
                    | Code::Unimplemented
            ),
            // ALREADY_EXISTS ends by itself when the router has noticed that the other is gone.
            _ => false,
        }
    }
}

impl From<tonic::Status> for Ended {
    fn from(status: tonic::Status) -> Self {
        Self::Status(Box::new(status))
    }
}
