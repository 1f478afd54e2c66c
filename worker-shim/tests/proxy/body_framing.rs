//! Bodies with arbitrary bytes, chunks and framing are forwarded unchanged.

use proptest::prelude::*;

use crate::support::*;

#[derive(Clone, Debug)]
struct Body {
    pieces: Vec<Vec<u8>>,
    chunked: bool,
}

impl Body {
    fn whole(&self) -> Vec<u8> {
        self.pieces.concat()
    }

    fn framing(&self) -> String {
        match self.chunked {
            true => "transfer-encoding: chunked".to_owned(),
            false => format!("content-length: {}", self.whole().len()),
        }
    }

    /// Sends the pieces one after another, each with its own write.
    async fn send(&self, to: &mut Raw) {
        for piece in &self.pieces {
            match self.chunked {
                true => {
                    let head = format!("{:x};ext=1\r\n", piece.len());
                    to.write([head.as_bytes(), piece, b"\r\n"].concat()).await;
                }
                false => to.write(piece).await,
            }
        }
        if self.chunked {
            to.write("0\r\n\r\n").await;
        }
    }

    async fn arrives(&self, at: &mut Raw) {
        let head = at.head().await;
        assert!(head.contains(&self.framing()), "{head}");
        let seen = match self.chunked {
            true => at.chunked().await,
            false => at.bytes(self.whole().len()).await,
        };
        assert!(seen == self.whole());
    }
}

fn body() -> impl Strategy<Value = Body> {
    let piece = prop_oneof![
        proptest::collection::vec(any::<u8>(), 1..50),
        (any::<u8>(), 1usize..200_000).prop_map(|(byte, length)| vec![byte; length]),
    ];
    (proptest::collection::vec(piece, 0..8), any::<bool>())
        .prop_map(|(pieces, chunked)| Body { pieces, chunked })
}

async fn exchanges(bodies: Vec<(Body, Body)>) {
    let engine = RawEngine::start().await;
    let proxy = ProxyUnderTest::in_front_of(engine.address).await;
    let mut client = proxy.connect().await;
    let mut connection = None;
    for (request, reply) in bodies {
        let sending = async {
            let framing = request.framing();
            client.write(format!("POST /tokenize HTTP/1.1\r\nhost: a\r\n{framing}\r\n\r\n")).await;
            request.send(&mut client).await;
            reply.arrives(&mut client).await;
        };
        let answering = async {
            // One connection is enough, because each reply is read to its end.
            let mut here = match connection.take() {
                Some(here) => here,
                None => engine.accept().await,
            };
            request.arrives(&mut here).await;
            here.write(format!("HTTP/1.1 200 OK\r\n{}\r\n\r\n", reply.framing())).await;
            reply.send(&mut here).await;
            here
        };
        connection = Some(tokio::join!(sending, answering).1);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]

    #[test]
    fn bodies_of_any_framing_are_forwarded_unchanged(
        bodies in proptest::collection::vec((body(), body()), 1..4)
    ) {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(exchanges(bodies));
    }
}
