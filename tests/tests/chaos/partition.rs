//! A shim is cut off from its routers, with no word from either end.

use std::net::SocketAddr;
use std::sync::Mutex;
use std::time::Duration;

use splitrail_tests::process_cluster::{Plan, ProcessCluster, ProcessKind};
use splitrail_tests::traffic::Traffic;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// What stands between all shims and one router: passes bytes on, or holds them back.
struct Wire {
    open: watch::Sender<bool>,
    _pumps: JoinSet<()>,
}

impl Wire {
    /// Listens at `at`; passes on to `to`.
    fn lay(at: std::net::TcpListener, to: SocketAddr) -> Self {
        let (open, opened) = watch::channel(true);
        at.set_nonblocking(true).unwrap();
        let listener = TcpListener::from_std(at).unwrap();
        let mut pumps = JoinSet::new();
        pumps.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((near, _)) = listener.accept().await {
                let opened = opened.clone();
                connections.spawn(async move {
                    let Ok(far) = TcpStream::connect(to).await else { return };
                    let ((near_in, near_out), (far_in, far_out)) =
                        (near.into_split(), far.into_split());
                    tokio::select! {
                        () = pump(near_in, far_out, opened.clone()) => {}
                        () = pump(far_in, near_out, opened) => {}
                    }
                });
            }
        });
        Self { open, _pumps: pumps }
    }
}

async fn pump(
    mut from: impl tokio::io::AsyncRead + Unpin,
    mut to: impl tokio::io::AsyncWrite + Unpin,
    mut open: watch::Receiver<bool>,
) {
    let mut bytes = vec![0; 16 << 10];
    loop {
        let Ok(read) = from.read(&mut bytes).await else { return };
        // Held back, not lost: what comes late is as bad as what never comes.
        if read == 0 || open.wait_for(|open| *open).await.is_err() {
            return;
        }
        if to.write_all(&bytes[..read]).await.is_err() {
            return;
        }
    }
}

/// Addresses in front of the routers', laid once the routers' are known.
static WIRES: Mutex<Vec<(std::net::TcpListener, SocketAddr)>> = Mutex::new(Vec::new());

fn between(router: SocketAddr) -> SocketAddr {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let address = listener.local_addr().unwrap();
    WIRES.lock().unwrap().push((listener, router));
    address
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_silent_partition_is_noticed_and_repaired() {
    let _alone = super::ALONE.lock().await;
    // The listeners exist before anybody connects to them: connections wait there.
    let wires = async {
        loop {
            let laid = std::mem::take(&mut *WIRES.lock().unwrap());
            if laid.len() == 2 {
                return laid.into_iter().map(|(at, to)| Wire::lay(at, to)).collect::<Vec<_>>();
            }
            WIRES.lock().unwrap().extend(laid);
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    let plan = Plan { between, ..Plan::default() };
    let (wires, stand) = tokio::join!(wires, ProcessCluster::start(plan));
    let routers: Vec<_> =
        stand.of(ProcessKind::Router).into_iter().map(|at| stand.posts[at].http).collect();
    let traffic = Traffic::start(&routers, 4, 11).await;
    tokio::time::sleep(Duration::from_millis(300)).await;
    // One router hears nothing of any worker any more; requests go on.
    wires[0].open.send_replace(false);
    tokio::time::sleep(Duration::from_secs(2)).await;
    wires[0].open.send_replace(true);
    traffic.pause().await;
    traffic.check();
    stand.true_picture("a short cut").await;
    traffic.go_on();
    // For longer than either end waits for a sign of life.
    wires[0].open.send_replace(false);
    tokio::time::sleep(Duration::from_secs(25)).await;
    wires[0].open.send_replace(true);
    traffic.pause().await;
    traffic.check();
    stand.true_picture("a long cut").await;
    traffic.check();
}
