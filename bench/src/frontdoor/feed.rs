//! The KV events of an engine that holds some prompts and much else, for whoever asks for
//! a replay of them.

use std::time::{SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_uint};
use tokio::task::JoinSet;
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::text::mix;
use super::{BLOCK_SIZE, Failure};

/// Blocks of an event.
const BATCH_BLOCKS: usize = 128;
/// What ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];
/// Token ids of what no prompt has.
const VOCABULARY: u64 = 100_000;

/// An engine's publisher; it ends when this is dropped.
pub(super) struct Feed {
    /// Where events come from, and where they are replayed.
    pub(super) endpoints: [String; 2],
    _tasks: JoinSet<()>,
}

impl Feed {
    /// Publishes that an engine holds these prompts, and others up to so many blocks.
    ///
    /// # Errors
    /// Ports that cannot be had.
    pub(super) async fn start(
        seed: u64,
        held: &[Vec<u32>],
        blocks: usize,
    ) -> Result<Self, Failure> {
        let batches = batches(seed, held, blocks)?;
        let (mut live, mut replay) = (PubSocket::new(), RouterSocket::new());
        let events = live.bind("tcp://127.0.0.1:0").await?.to_string();
        let replays = replay.bind("tcp://127.0.0.1:0").await?.to_string();
        let mut tasks = JoinSet::new();
        tasks.spawn(async move {
            // Nothing changes, but subscribers are to find it open.
            let _live = live;
            while let Ok(request) = replay.recv().await {
                if tell(&mut replay, request, &batches).await.is_err() {
                    return;
                }
            }
        });
        Ok(Self { endpoints: [events, replays], _tasks: tasks })
    }
}

async fn tell(
    socket: &mut RouterSocket,
    request: ZmqMessage,
    batches: &[Bytes],
) -> Result<(), Failure> {
    let frames = request.into_vec();
    // Who asks, an empty frame, and the first number wanted.
    let [peer, delimiter, first] = frames.as_slice() else { return Ok(()) };
    let Ok(first) = <[u8; 8]>::try_from(first.as_ref()) else { return Ok(()) };
    let first = usize::try_from(u64::from_be_bytes(first))?;
    let wanted = batches.iter().enumerate().skip(first);
    let wanted = wanted.map(|(at, batch)| ((at as u64).to_be_bytes(), batch.clone()));
    for (number, payload) in wanted.chain([(END_OF_REPLAY, Bytes::new())]) {
        let number = Bytes::copy_from_slice(&number);
        let frames = vec![peer.clone(), delimiter.clone(), Bytes::new(), number, payload];
        let message = ZmqMessage::try_from(frames).map_err(|_| "a message of no frames")?;
        socket.send(message).await?;
    }
    Ok(())
}

fn batches(seed: u64, held: &[Vec<u32>], blocks: usize) -> Result<Vec<Bytes>, Failure> {
    let mut left = blocks;
    let mut out = Vec::new();
    for (number, tokens) in held.iter().enumerate() {
        left = left.saturating_sub(tokens.len() / BLOCK_SIZE);
        chain(&mut out, mix(seed) ^ number as u64, tokens)?;
    }
    // Conversations of nobody's.
    for number in 0.. {
        let size = left.min(BATCH_BLOCKS);
        if size == 0 {
            break;
        }
        left -= size;
        let seed = mix(mix(seed) ^ (number + 1000));
        let tokens = (0..(size * BLOCK_SIZE) as u64).map(|at| (mix(seed ^ at) % VOCABULARY) as u32);
        chain(&mut out, seed, &tokens.collect::<Vec<_>>())?;
    }
    Ok(out)
}

/// The events of one chain of blocks.
fn chain(out: &mut Vec<Bytes>, seed: u64, tokens: &[u32]) -> Result<(), Failure> {
    let name = |block: usize| mix(mix(seed) ^ block as u64);
    let pieces = tokens.chunks(BATCH_BLOCKS * BLOCK_SIZE).enumerate();
    for (piece, tokens) in pieces {
        let first = piece * BATCH_BLOCKS;
        let blocks = tokens.len() / BLOCK_SIZE;
        let names: Vec<u64> = (first..first + blocks).map(name).collect();
        if !names.is_empty() {
            let parent = first.checked_sub(1).map(name);
            out.push(stored(&names, parent, &tokens[..blocks * BLOCK_SIZE])?.into());
        }
    }
    Ok(())
}

/// `[timestamp, [BlockStored], data parallel rank]`, as vLLM 0.32 has it.
fn stored(names: &[u64], parent: Option<u64>, tokens: &[u32]) -> Result<Vec<u8>, Failure> {
    let mut out = Vec::with_capacity(names.len() * 9 + tokens.len() * 5 + 200);
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    write_array_len(&mut out, 3)?;
    write_f64(&mut out, seconds)?;
    write_array_len(&mut out, 1)?;
    write_map_len(&mut out, 8)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockStored")?;
    write_str(&mut out, "block_hashes")?;
    write_array_len(&mut out, u32::try_from(names.len())?)?;
    for name in names {
        write_uint(&mut out, *name)?;
    }
    write_str(&mut out, "parent_block_hash")?;
    match parent {
        Some(name) => drop(write_uint(&mut out, name)?),
        None => write_nil(&mut out)?,
    }
    write_str(&mut out, "token_ids")?;
    write_array_len(&mut out, u32::try_from(tokens.len())?)?;
    for token in tokens {
        write_uint(&mut out, u64::from(*token))?;
    }
    write_str(&mut out, "block_size")?;
    write_uint(&mut out, BLOCK_SIZE as u64)?;
    write_str(&mut out, "lora_id")?;
    write_nil(&mut out)?;
    write_str(&mut out, "medium")?;
    write_str(&mut out, "GPU")?;
    write_str(&mut out, "lora_name")?;
    write_nil(&mut out)?;
    write_uint(&mut out, 0)?;
    Ok(out)
}
