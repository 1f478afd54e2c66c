//! Why a stream to a router ended, and whether another attempt is likely to succeed soon.

use splitrail_kv::HASH_LAYOUT;
use splitrail_proto::v1::Welcome;
use tonic::Code;

use crate::mirror::Disagreement;

/// The version of the protocol between shims and routers.
pub(crate) const PROTOCOL: u32 = 1;

/// Why a router cannot work with this shim.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum IncompatibleRouter {
    /// The router uses another version of the protocol.
    #[error("the router speaks version {0} of the protocol")]
    Protocol(u32),
    /// The router hashes blocks in another way.
    #[error("the router hashes blocks in layout {0}, the shim in {HASH_LAYOUT}")]
    HashLayout(u32),
    /// The router's block size differs from the engine's.
    #[error("the router's block_size is {router}, the engine's {engine}")]
    BlockSize {
        /// Tokens per block at the router.
        router: u32,
        /// Tokens per block at the engine; 0 if unknown.
        engine: u32,
    },
    /// The router does not agree with other routers on how blocks are hashed.
    #[error(transparent)]
    Terms(#[from] Disagreement),
}

impl IncompatibleRouter {
    /// Checks a welcome without regard to other routers.
    ///
    /// # Errors
    /// If the protocol, the hash layout or the block size differs.
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

/// Why a stream, or the attempt to open one, ended.
#[derive(Debug, thiserror::Error)]
pub(super) enum StreamEnd {
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
    #[error("the router's first message is not a welcome")]
    NotWelcome,
    #[error(transparent)]
    Incompatible(#[from] IncompatibleRouter),
    #[error("{:?}: {}", .0.code(), .0.message())]
    Status(Box<tonic::Status>),
    #[error("the router ended the stream")]
    Closed,
    #[error("the router has stopped reading")]
    Stalled,
    #[error("another stream to the same router has replaced this one")]
    Superseded,
}

impl StreamEnd {
    /// Whether the next attempt is likely to fail in the same way until an operator intervenes.
    pub(super) fn is_permanent(&self) -> bool {
        match self {
            Self::Token(_) | Self::Certificates(_) | Self::Tls(_) => true,
            Self::NotWelcome | Self::Incompatible(_) => true,
            Self::Status(status) => matches!(
                status.code(),
                Code::Unauthenticated
                    | Code::PermissionDenied
                    | Code::NotFound
                    | Code::FailedPrecondition
                    | Code::InvalidArgument
                    | Code::Unimplemented
            ),
            // ALREADY_EXISTS ends when the router notices that the other stream is gone.
            _ => false,
        }
    }
}

impl From<tonic::Status> for StreamEnd {
    fn from(status: tonic::Status) -> Self {
        Self::Status(Box::new(status))
    }
}
