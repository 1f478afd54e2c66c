//! The KV events of an engine that holds some prompts and many other blocks: a replay on request,
//! and a stream of new conversations.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_uint};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::text::mix;
use super::{BLOCK_SIZE, Failure};

/// Blocks of an event.
const BATCH_BLOCKS: usize = 128;
/// A conversation comes or goes so often,
const NEWS_EVERY: Duration = Duration::from_millis(50);
/// is of so many blocks,
const NEWS_BLOCKS: usize = 8;
/// and so many are held.
const NEWS_HELD: u64 = 64;
/// What ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];
/// Token ids of what no prompt has.
const VOCABULARY: u64 = 100_000;

/// An engine's publisher; it ends when this is dropped.
pub(super) struct Feed {
    /// Where events come from, and where they are replayed.
    pub(super) endpoints: [String; 2],
    is_quiet: Arc<AtomicBool>,
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
        let mut batches = batches(seed, held, blocks)?;
        let (mut live, mut replay) = (PubSocket::new(), RouterSocket::new());
        let events = live.bind("tcp://127.0.0.1:0").await?.to_string();
        let replays = replay.bind("tcp://127.0.0.1:0").await?.to_string();
        let mut tasks = JoinSet::new();
        let is_quiet = Arc::new(AtomicBool::new(false));
        let hushed = Arc::clone(&is_quiet);
        tasks.spawn(async move {
            let mut news = News::new(seed);
            let mut ticks = interval(NEWS_EVERY);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let done = tokio::select! {
                    request = replay.recv() => match request {
                        Ok(request) => tell(&mut replay, request, &batches).await,
                        Err(_) => return,
                    },
                    _ = ticks.tick() => match hushed.load(Ordering::Relaxed) {
                        true => Ok(()),
                        false => news.publish(&mut live, &mut batches).await,
                    },
                };
                if done.is_err() {
                    return;
                }
            }
        });
        Ok(Self { endpoints: [events, replays], is_quiet, _tasks: tasks })
    }

    /// No conversation comes or goes any more.
    pub(super) fn hush(&self) {
        self.is_quiet.store(true, Ordering::Relaxed);
    }
}

/// Conversations that come, and go again when others have come.
struct News {
    seed: u64,
    count: u64,
}

impl News {
    fn new(seed: u64) -> Self {
        Self { seed: mix(seed ^ 0xfeed), count: 0 }
    }

    /// Stores a conversation, or removes an old one: what is held stays as much.
    async fn publish(
        &mut self,
        socket: &mut PubSocket,
        batches: &mut Vec<Bytes>,
    ) -> Result<(), Failure> {
        let seed = |number: u64| mix(self.seed ^ number);
        let (number, comes) = (self.count / 2, self.count.is_multiple_of(2));
        self.count += 1;
        if comes {
            let tokens = 0..(NEWS_BLOCKS * BLOCK_SIZE) as u64;
            let tokens = tokens.map(|at| (mix(seed(number) ^ at) % VOCABULARY) as u32);
            chain(batches, seed(number), &tokens.collect::<Vec<_>>())?;
        } else {
            let Some(gone) = number.checked_sub(NEWS_HELD) else { return Ok(()) };
            let names = (0..NEWS_BLOCKS).rev().map(|block| name(seed(gone), block));
            batches.push(removed(&names.collect::<Vec<_>>())?.into());
        }
        let payload = batches.last().cloned().unwrap_or_default();
        let number = Bytes::copy_from_slice(&(batches.len() as u64 - 1).to_be_bytes());
        let message = ZmqMessage::try_from(vec![Bytes::new(), number, payload]);
        socket.send(message.map_err(|_| "a message of no frames")?).await?;
        Ok(())
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

/// An engine's name of a block.
fn name(seed: u64, block: usize) -> u64 {
    mix(mix(seed) ^ block as u64)
}

/// The events of one chain of blocks.
fn chain(out: &mut Vec<Bytes>, seed: u64, tokens: &[u32]) -> Result<(), Failure> {
    let name = |block: usize| name(seed, block);
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
    begin(&mut out)?;
    write_map_len(&mut out, 8)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockStored")?;
    write_names(&mut out, names)?;
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

/// The same of blocks that are gone.
fn removed(names: &[u64]) -> Result<Vec<u8>, Failure> {
    let mut out = Vec::with_capacity(names.len() * 9 + 100);
    begin(&mut out)?;
    write_map_len(&mut out, 3)?;
    write_str(&mut out, "type")?;
    write_str(&mut out, "BlockRemoved")?;
    write_names(&mut out, names)?;
    write_str(&mut out, "medium")?;
    write_str(&mut out, "GPU")?;
    write_uint(&mut out, 0)?;
    Ok(out)
}

/// A batch of one event, up to that.
fn begin(out: &mut Vec<u8>) -> Result<(), Failure> {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH)?.as_secs_f64();
    write_array_len(out, 3)?;
    write_f64(out, seconds)?;
    write_array_len(out, 1)?;
    Ok(())
}

fn write_names(out: &mut Vec<u8>, names: &[u64]) -> Result<(), Failure> {
    write_str(out, "block_hashes")?;
    write_array_len(out, u32::try_from(names.len())?)?;
    for name in names {
        write_uint(out, *name)?;
    }
    Ok(())
}
