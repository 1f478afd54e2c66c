//! The KV events of a mock engine that holds some prompts and many other blocks: a replay on
//! request, and events of conversations that are stored and removed.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use rmp::encode::{write_array_len, write_f64, write_map_len, write_nil, write_str, write_uint};
use tokio::task::JoinSet;
use tokio::time::{MissedTickBehavior, interval};
use zeromq::{PubSocket, RouterSocket, Socket, SocketRecv, SocketSend, ZmqMessage};

use super::{BLOCK_SIZE, Failure};
use crate::splitmix::mix;

/// Maximum number of blocks of an event.
const BATCH_BLOCKS: usize = 128;
/// Interval between two events, each of which stores or removes a conversation.
const CONVERSATION_INTERVAL: Duration = Duration::from_millis(50);
/// Number of blocks of a conversation.
const CONVERSATION_BLOCKS: usize = 8;
/// Number of conversations that the engine holds before it removes the oldest one.
const CONVERSATIONS_HELD: u64 = 64;
/// The sequence number of the message that ends a replay.
const END_OF_REPLAY: [u8; 8] = [0xff; 8];
/// Number of token ids of blocks that belong to no prompt.
const VOCABULARY: u64 = 100_000;

/// Publishes and replays the KV events of an engine. It ends when it is dropped.
pub(super) struct EventPublisher {
    /// The endpoints of live events and of replays.
    pub(super) endpoints: [String; 2],
    /// Whether conversations are no longer stored and removed.
    is_stopped: Arc<AtomicBool>,
    _tasks: JoinSet<()>,
}

impl EventPublisher {
    /// Starts a publisher of an engine that holds the prompts `held`, and further blocks up to
    /// `blocks` blocks in all.
    ///
    /// # Errors
    /// No port is free.
    pub(super) async fn start(
        seed: u64,
        held: &[Vec<u32>],
        blocks: usize,
    ) -> Result<Self, Failure> {
        let mut batches = batches(seed, held, blocks)?;
        let (mut live, mut replays) = (PubSocket::new(), RouterSocket::new());
        let live_endpoint = live.bind("tcp://127.0.0.1:0").await?.to_string();
        let replay_endpoint = replays.bind("tcp://127.0.0.1:0").await?.to_string();
        let mut tasks = JoinSet::new();
        let is_stopped = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&is_stopped);
        tasks.spawn(async move {
            let mut conversations = Conversations::new(seed);
            let mut ticks = interval(CONVERSATION_INTERVAL);
            ticks.set_missed_tick_behavior(MissedTickBehavior::Delay);
            loop {
                let done = tokio::select! {
                    request = replays.recv() => match request {
                        Ok(request) => replay(&mut replays, request, &batches).await,
                        Err(_) => return,
                    },
                    _ = ticks.tick() => match stopped.load(Ordering::Relaxed) {
                        true => Ok(()),
                        false => conversations.publish(&mut live, &mut batches).await,
                    },
                };
                if done.is_err() {
                    return;
                }
            }
        });
        Ok(Self { endpoints: [live_endpoint, replay_endpoint], is_stopped, _tasks: tasks })
    }

    /// Stores and removes no conversation any more. Replays go on.
    pub(super) fn stop_conversations(&self) {
        self.is_stopped.store(true, Ordering::Relaxed);
    }
}

/// Conversations that are stored, and removed after [`CONVERSATIONS_HELD`] others were stored.
struct Conversations {
    seed: u64,
    /// Number of calls of `publish`; every second one removes a conversation.
    count: u64,
}

impl Conversations {
    fn new(seed: u64) -> Self {
        Self { seed: mix(seed ^ 0xfeed), count: 0 }
    }

    /// Publishes that a conversation was stored, or that the oldest one was removed, in turns, so
    /// that the number of blocks stays the same.
    async fn publish(
        &mut self,
        socket: &mut PubSocket,
        batches: &mut Vec<Bytes>,
    ) -> Result<(), Failure> {
        let seed = |number: u64| mix(self.seed ^ number);
        let (number, stores) = (self.count / 2, self.count.is_multiple_of(2));
        self.count += 1;
        if stores {
            let tokens = 0..(CONVERSATION_BLOCKS * BLOCK_SIZE) as u64;
            let tokens = tokens.map(|at| (mix(seed(number) ^ at) % VOCABULARY) as u32);
            chain(batches, seed(number), &tokens.collect::<Vec<_>>())?;
        } else {
            let Some(oldest) = number.checked_sub(CONVERSATIONS_HELD) else { return Ok(()) };
            let names = (0..CONVERSATION_BLOCKS).rev().map(|block| name(seed(oldest), block));
            batches.push(removed(&names.collect::<Vec<_>>())?.into());
        }
        let payload = batches.last().cloned().unwrap_or_default();
        let number = Bytes::copy_from_slice(&(batches.len() as u64 - 1).to_be_bytes());
        let message = ZmqMessage::try_from(vec![Bytes::new(), number, payload]);
        socket.send(message.map_err(|_| "a message has no frames")?).await?;
        Ok(())
    }
}

/// Replies to the request for a replay: with all batches from a sequence number on.
async fn replay(
    socket: &mut RouterSocket,
    request: ZmqMessage,
    batches: &[Bytes],
) -> Result<(), Failure> {
    let frames = request.into_vec();
    // The sender, an empty frame, and the first sequence number that the sender wants.
    let [peer, delimiter, first] = frames.as_slice() else { return Ok(()) };
    let Ok(first) = <[u8; 8]>::try_from(first.as_ref()) else { return Ok(()) };
    let first = usize::try_from(u64::from_be_bytes(first))?;
    let wanted = batches.iter().enumerate().skip(first);
    let wanted = wanted.map(|(at, batch)| ((at as u64).to_be_bytes(), batch.clone()));
    for (number, payload) in wanted.chain([(END_OF_REPLAY, Bytes::new())]) {
        let number = Bytes::copy_from_slice(&number);
        let frames = vec![peer.clone(), delimiter.clone(), Bytes::new(), number, payload];
        let message = ZmqMessage::try_from(frames).map_err(|_| "a message has no frames")?;
        socket.send(message).await?;
    }
    Ok(())
}

/// The events by which the engine got the prompts `held` and its further blocks.
fn batches(seed: u64, held: &[Vec<u32>], blocks: usize) -> Result<Vec<Bytes>, Failure> {
    let mut left = blocks;
    let mut out = Vec::new();
    for (number, tokens) in held.iter().enumerate() {
        left = left.saturating_sub(tokens.len() / BLOCK_SIZE);
        chain(&mut out, mix(seed) ^ number as u64, tokens)?;
    }
    // Blocks that no prompt of the benchmark has.
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

/// The engine's name of a block of the chain with a seed.
fn name(seed: u64, block: usize) -> u64 {
    mix(mix(seed) ^ block as u64)
}

/// Appends the events that store one chain of blocks.
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

/// A batch `[timestamp, [BlockStored], data parallel rank]`, as vLLM 0.32 publishes it.
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

/// A batch `[timestamp, [BlockRemoved], data parallel rank]`, as vLLM 0.32 publishes it.
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

/// Writes the beginning of a batch with one event: the timestamp and the head of the event list.
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
