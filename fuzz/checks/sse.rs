//! A stream of server-sent events. The first two bytes choose the bound on an
//! event and where the stream is cut; the rest is the stream.

use splitrail_engine::sse::{Piece, Splitter};

pub(crate) fn check(data: &[u8]) {
    let [bound, cuts, stream @ ..] = data else {
        return;
    };
    let bounds = [usize::from(*bound), stream.len()];
    for max_bytes in bounds {
        let whole = split(&[stream], max_bytes);
        assert_eq!(split(&every(1, stream), max_bytes), whole, "cut after each byte");
        let length = usize::from(*cuts % 7) + 2;
        assert_eq!(split(&every(length, stream), max_bytes), whole, "cut each {length} bytes");
        for piece in &whole.pieces {
            if let Piece::Data(data) = piece {
                assert!(data.len() <= max_bytes);
            }
        }
    }
    let mut whole = split(&[stream], stream.len());
    assert!(!whole.too_long, "no event is longer than the stream");
    whole.pieces.retain(|piece| !matches!(piece, Piece::Comment(_)));
    assert_eq!(whole.pieces, plainly(stream));
}

#[derive(Debug, PartialEq, Eq)]
struct Outcome {
    pieces: Vec<Piece>,
    too_long: bool,
}

fn every(length: usize, stream: &[u8]) -> Vec<&[u8]> {
    stream.chunks(length).collect()
}

fn split(chunks: &[&[u8]], max_bytes: usize) -> Outcome {
    let mut splitter = Splitter::new(max_bytes);
    let mut pieces = Vec::new();
    for chunk in chunks {
        splitter.push(chunk);
        loop {
            match splitter.next_piece() {
                Ok(Some(piece)) => pieces.push(piece),
                Ok(None) => break,
                Err(_) => return Outcome { pieces, too_long: true },
            }
        }
    }
    Outcome { pieces, too_long: false }
}

/// The same by lines, without bounds and comments: data lines are gathered until a blank one.
fn plainly(stream: &[u8]) -> Vec<Piece> {
    let mut pieces = Vec::new();
    let mut gathered: Option<Vec<u8>> = None;
    // What follows the last line feed is no line yet.
    let end = stream.iter().rposition(|byte| *byte == b'\n').unwrap_or(0);
    for line in stream[..end].split(|byte| *byte == b'\n') {
        let line = line.strip_suffix(b"\r").unwrap_or(line);
        if let Some(data) = line.strip_prefix(b"data:") {
            let data = data.strip_prefix(b" ").unwrap_or(data);
            match &mut gathered {
                Some(gathered) => gathered.extend([b"\n", data].concat()),
                None => gathered = Some(data.to_vec()),
            }
        } else if line.is_empty()
            && let Some(data) = gathered.take()
        {
            let done = data == b"[DONE]";
            pieces.push(if done { Piece::Done } else { Piece::Data(data.into()) });
        }
    }
    pieces
}
