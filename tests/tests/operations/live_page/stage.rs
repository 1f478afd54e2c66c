//! A listener that serves the page as the router does, with a stream that the test writes.

use std::net::SocketAddr;
use std::sync::Arc;

use bytes::Bytes;
use serde_json::Value;
use splitrail_tests::Client;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::watch;
use tokio::task::JoinSet;

/// The listener. Dropping it ends it.
pub(crate) struct Stage {
    address: SocketAddr,
    snapshots: watch::Sender<Arc<[Value]>>,
    _accepting: JoinSet<()>,
}

impl Stage {
    /// Serves the page, with the headers that it has, and everything but the stream from `admin`.
    pub(crate) async fn start(admin: Client) -> Self {
        let listener = TcpListener::bind(("127.0.0.1", 0)).await.unwrap();
        let address = listener.local_addr().unwrap();
        let (snapshots, watched) = watch::channel(Arc::from([]));
        let mut accepting = JoinSet::new();
        accepting.spawn(async move {
            let mut connections = JoinSet::new();
            while let Ok((socket, _)) = listener.accept().await {
                let (admin, watched) = (admin.clone(), watched.clone());
                connections.spawn(async move {
                    // A browser may go away at any time.
                    let _gone = answer(socket, &admin, watched).await;
                });
                while connections.try_join_next().is_some() {}
            }
        });
        Self { address, snapshots, _accepting: accepting }
    }

    pub(crate) fn url(&self) -> String {
        format!("http://{}/", self.address)
    }

    /// Sends these snapshots to who watches, and to who comes later.
    pub(crate) fn send(&self, snapshots: Vec<Value>) {
        self.snapshots.send_replace(snapshots.into());
    }
}

async fn answer(
    mut socket: TcpStream,
    admin: &Client,
    mut watched: watch::Receiver<Arc<[Value]>>,
) -> std::io::Result<()> {
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(socket.read_u8().await?);
    }
    let head = String::from_utf8_lossy(&head).into_owned();
    let path = head.split(' ').nth(1).unwrap_or_default().to_owned();
    if path != splitrail_tests::live::LIVE {
        let reply = admin.get(&path).await;
        let mut text = format!("HTTP/1.1 {}\r\nconnection: close\r\n", reply.status);
        for (name, value) in &reply.headers {
            text += &format!("{name}: {}\r\n", value.to_str().unwrap_or_default());
        }
        return write(&mut socket, &[text.as_bytes(), b"\r\n", &reply.body].concat()).await;
    }
    let head = "HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n";
    write(&mut socket, head.as_bytes()).await?;
    watched.mark_changed();
    while watched.changed().await.is_ok() {
        let snapshots = Arc::clone(&watched.borrow_and_update());
        for snapshot in snapshots.iter() {
            let event = Bytes::from(format!("event: snapshot\ndata: {snapshot}\n\n"));
            write(&mut socket, &event).await?;
        }
    }
    Ok(())
}

async fn write(socket: &mut TcpStream, bytes: &[u8]) -> std::io::Result<()> {
    socket.write_all(bytes).await
}
