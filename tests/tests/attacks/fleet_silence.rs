//! Clients of the fleet listener that say too little or read nothing.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use splitrail_proto::v1;
use splitrail_tests::frames::{frame, kind};
use splitrail_tests::raw::connect_narrow;
use splitrail_tests::shim::{Shim, hello};
use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream};
use tokio::time::timeout;
use tonic::Code;
use tonic::transport::Endpoint;

use super::support::{Site, engine};

/// Nothing takes longer, unless it never ends.
const PATIENCE: Duration = Duration::from_secs(45);
const PREFACE: &[u8] = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n";

/// A router to which shims may attach, with further keys of `fleet`.
async fn site(fleet: &str) -> Site {
    let top = format!("fleet: {{ {fleet} }}");
    Site::start(&top, "    discovery: [{ kind: shim }]", tempfile::tempdir().unwrap()).await
}

/// Waits until the router has closed a connection on which a client has sent `bytes`.
async fn closed_after(address: SocketAddr, bytes: &[u8]) {
    let mut socket = TcpStream::connect(address).await.unwrap();
    socket.write_all(bytes).await.unwrap();
    let ended = timeout(PATIENCE, socket.read(&mut [0; 64])).await.expect("the router closes it");
    assert!(matches!(ended, Ok(0) | Err(_)), "{ended:?}");
}

#[tokio::test]
async fn a_connection_whose_tls_handshake_does_not_end_is_closed() {
    let file = |name| Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures/tls").join(name);
    let tls = format!("tls: {{ cert: {:?}, key: {:?} }}", file("router.pem"), file("router.key"));
    let site = site(&tls).await;
    // The beginning of a record of 512 bytes with a ClientHello.
    let mut half = vec![0x16, 3, 1, 2, 0, 1, 0, 1, 0xfc, 3, 3];
    half.extend([7; 100]);
    tokio::join!(closed_after(site.fleet_address, b""), closed_after(site.fleet_address, &half));
}

#[tokio::test]
async fn a_client_that_reads_no_replies_to_its_pings_is_disconnected() {
    let site = site("").await;
    let mut socket = connect_narrow(site.fleet_address).await;
    let pings = frame(kind::PING, 0, 0, &[0; 8]).repeat(1000);
    socket.write_all(&[PREFACE, &frame(kind::SETTINGS, 0, 0, &[])].concat()).await.unwrap();
    // The router takes no more of them once its replies fill the buffers between both.
    let flood = async { while socket.write_all(&pings).await.is_ok() {} };
    timeout(PATIENCE, flood).await.expect("the router closes the connection");
}

#[tokio::test]
async fn a_hello_for_an_occupied_worker_keeps_its_connection_open_no_longer_than_silence() {
    let site = site("").await;
    let own = engine().await;
    let endpoint = Endpoint::from_shared(format!("http://{}", site.fleet_address)).unwrap();
    let attached = Shim::attach_over(endpoint.connect_lazy(), None, hello("s0", &own.url())).await;
    let _attached = attached.unwrap();
    let thief = v1::Hello {
        instance_id: "thief".into(),
        instance_secret: b"the secret of the thief, its process".to_vec(),
        ..hello("s0", &own.url())
    };
    let relay = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let at = relay.local_addr().unwrap();
    let only_connection = async {
        let (mut near, _) = relay.accept().await.unwrap();
        let mut far = TcpStream::connect(site.fleet_address).await.unwrap();
        let _cut = copy_bidirectional(&mut near, &mut far).await;
    };
    let hellos = async {
        let endpoint = Endpoint::from_shared(format!("http://{at}")).unwrap();
        let channel = endpoint.connect_lazy();
        loop {
            let refused = Shim::attach_over(channel.clone(), None, thief.clone()).await.err();
            assert_eq!(refused.map(|status| status.code()), Some(Code::AlreadyExists));
            tokio::time::sleep(Duration::from_secs(1)).await;
        }
    };
    let ended = async {
        tokio::select! { biased; () = only_connection => {}, () = hellos => {} }
    };
    timeout(PATIENCE, ended).await.expect("the router closes the connection");
}
