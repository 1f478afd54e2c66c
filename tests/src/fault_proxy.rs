//! A proxy between a router and an engine, which breaks connections as a seed says.
//!
//! The fault of the n-th request over a link depends on the seed, the link and n alone: the same
//! seed gives the same faults.

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::time::Duration;

use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What happens to one request.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Fault {
    /// Nothing.
    None,
    /// The answer begins so many milliseconds later.
    Latency(u64),
    /// The connection is reset, and the engine never sees the request.
    Refused,
    /// The answer breaks after so many bytes.
    Break(Break, usize),
}

/// How an answer breaks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Break {
    /// The connection is reset.
    Reset,
    /// The connection is closed in order, as if the answer were whole.
    Truncation,
    /// The connection stays open, and silent.
    BlackHole,
}

/// The faults of one link.
#[derive(Clone, Copy, Debug)]
pub struct Schedule {
    /// The seed of the run.
    pub seed: u64,
    /// The number of the link.
    pub link: u64,
}

impl Schedule {
    /// The fault of a request, counted from 0.
    #[must_use]
    pub fn fault(self, request: u64) -> Fault {
        let links = self.link.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        let requests = request.wrapping_mul(0xd134_2543_de82_ef95);
        let mut rng = StdRng::seed_from_u64(self.seed ^ links ^ requests);
        let bytes = rng.random_range(1..1500);
        // Of 1,000 requests.
        match rng.random_range(0..1000) {
            0..6 => Fault::Refused,
            6..12 => Fault::Break(Break::Reset, 0),
            12..16 => Fault::Break(Break::Truncation, 0),
            16..18 => Fault::Break(Break::BlackHole, 0),
            18..23 => Fault::Break(Break::Reset, bytes),
            23..28 => Fault::Break(Break::Truncation, bytes),
            28..29 => Fault::Break(Break::BlackHole, bytes),
            29..69 => Fault::Latency(rng.random_range(1..200)),
            _ => Fault::None,
        }
    }
}

/// Requests that faults hit.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Hits {
    /// Before a byte of the answer was passed on: another worker can still be asked.
    pub before_answer: u64,
    /// Later.
    pub in_answer: u64,
}

/// The proxy. Dropping it ends its connections.
pub struct FaultProxy {
    address: SocketAddr,
    shared: Arc<Shared>,
    _tasks: JoinSet<()>,
}

struct Shared {
    to: SocketAddr,
    schedule: Option<Schedule>,
    requests: AtomicU64,
    before_answer: AtomicU64,
    in_answer: AtomicU64,
    /// Whether bytes get lost both ways.
    partitioned: watch::Sender<bool>,
}

impl FaultProxy {
    /// A proxy in front of `to`. Without a schedule it causes no faults by itself.
    pub async fn start(to: SocketAddr, schedule: Option<Schedule>) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.expect("a port");
        let address = listener.local_addr().expect("an address");
        let shared = Arc::new(Shared {
            to,
            schedule,
            requests: AtomicU64::new(0),
            before_answer: AtomicU64::new(0),
            in_answer: AtomicU64::new(0),
            partitioned: watch::Sender::new(false),
        });
        let mut tasks = JoinSet::new();
        let at_work = Arc::clone(&shared);
        tasks.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let shared = Arc::clone(&at_work);
                connections.spawn(async move {
                    // A connection that one of the ends breaks is over.
                    let _broken = carry(near, &shared).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, shared, _tasks: tasks }
    }

    /// Where it listens.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }

    /// From now on (until `false`) all bytes are lost, and no end learns of it. Connections that
    /// lost some are reset afterwards.
    pub fn partition(&self, is_partitioned: bool) {
        self.shared.partitioned.send_replace(is_partitioned);
    }

    /// Requests that faults have hit so far.
    #[must_use]
    pub fn hits(&self) -> Hits {
        Hits {
            before_answer: self.shared.before_answer.load(Relaxed),
            in_answer: self.shared.in_answer.load(Relaxed),
        }
    }
}

/// The request that a connection carries at present.
struct Exchange {
    fault: Fault,
    /// Bytes of its answer that were passed on.
    answered_bytes: usize,
    is_counted: bool,
}

impl Exchange {
    fn hit(&mut self, shared: &Shared) {
        if std::mem::replace(&mut self.is_counted, true) {
            return;
        }
        let hits = if self.answered_bytes == 0 { &shared.before_answer } else { &shared.in_answer };
        hits.fetch_add(1, Relaxed);
    }
}

async fn carry(mut near: TcpStream, shared: &Shared) -> io::Result<()> {
    let mut far = TcpStream::connect(shared.to).await?;
    let mut partitioned = shared.partitioned.subscribe();
    let (mut ask, mut answer) = (vec![0; 16 << 10], vec![0; 16 << 10]);
    let mut exchange: Option<Exchange> = None;
    let mut has_lost = false;
    loop {
        tokio::select! {
            _ = partitioned.changed() => {}
            read = near.read(&mut ask) => {
                let bytes = &ask[..read?];
                if bytes.is_empty() {
                    return Ok(());
                }
                if shared.schedule.is_some() && begins(bytes, exchange.as_ref()) {
                    exchange = Some(shared.next_exchange());
                }
                if *partitioned.borrow() {
                    has_lost = true;
                    exchange.iter_mut().for_each(|exchange| exchange.hit(shared));
                } else if let Some(exchange) = exchange.as_mut().filter(|it| it.fault == Fault::Refused) {
                    exchange.hit(shared);
                    return near.set_zero_linger();
                } else {
                    far.write_all(bytes).await?;
                }
            }
            read = far.read(&mut answer), if !has_lost => {
                let bytes = &answer[..read?];
                if *partitioned.borrow() {
                    has_lost = true;
                    exchange.iter_mut().for_each(|exchange| exchange.hit(shared));
                } else if bytes.is_empty() {
                    return near.shutdown().await;
                } else if let Some(exchange) = &mut exchange {
                    if !pass(&mut near, bytes, exchange, shared).await? {
                        return Ok(());
                    }
                } else {
                    near.write_all(bytes).await?;
                }
            }
        }
        if has_lost && !*partitioned.borrow() {
            return near.set_zero_linger();
        }
    }
}

/// Whether a request begins with these bytes: questions of health are left alone.
fn begins(bytes: &[u8], last: Option<&Exchange>) -> bool {
    bytes.starts_with(b"POST ") && last.is_none_or(|last| last.answered_bytes > 0)
}

impl Shared {
    fn next_exchange(&self) -> Exchange {
        let number = self.requests.fetch_add(1, Relaxed);
        let fault = self.schedule.map_or(Fault::None, |schedule| schedule.fault(number));
        Exchange { fault, answered_bytes: 0, is_counted: false }
    }
}

/// Passes a part of an answer on, as far as the fault lets it; whether the connection goes on.
async fn pass(
    near: &mut TcpStream,
    bytes: &[u8],
    exchange: &mut Exchange,
    shared: &Shared,
) -> io::Result<bool> {
    if let Fault::Latency(delay_ms) = exchange.fault
        && exchange.answered_bytes == 0
    {
        tokio::time::sleep(Duration::from_millis(delay_ms)).await;
    }
    let Fault::Break(how, after) = exchange.fault else {
        exchange.answered_bytes += bytes.len();
        near.write_all(bytes).await?;
        return Ok(true);
    };
    let taken = bytes.len().min(after - exchange.answered_bytes);
    near.write_all(&bytes[..taken]).await?;
    exchange.answered_bytes += taken;
    if taken == bytes.len() {
        return Ok(true);
    }
    exchange.hit(shared);
    match how {
        Break::Reset => near.set_zero_linger()?,
        Break::Truncation => near.shutdown().await?,
        // Until the other end gives up.
        Break::BlackHole => while near.read(&mut [0; 1024]).await? > 0 {},
    }
    Ok(false)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_seed_gives_the_same_faults() {
        let faults = |seed, link| {
            let schedule = Schedule { seed, link };
            (0..2000).map(|request| schedule.fault(request)).collect::<Vec<_>>()
        };
        assert_eq!(faults(7, 1), faults(7, 1));
        assert_ne!(faults(7, 1), faults(7, 2));
        assert_ne!(faults(7, 1), faults(8, 1));
        let count = |kind: fn(&Fault) -> bool| faults(7, 1).iter().filter(|it| kind(it)).count();
        assert!((40..100).contains(&count(|it| !matches!(it, Fault::None | Fault::Latency(_)))));
        assert!(count(|it| matches!(it, Fault::Latency(_))) > 40);
    }
}
