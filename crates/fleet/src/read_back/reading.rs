//! Pinned KV from the decode leg that leaves it to the prefill leg that reads it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use splitrail_engine::connectors::nixl::PinnedKv;
use splitrail_engine_client::SendState;
use splitrail_kv::BlockHash;
use splitrail_telemetry::Metrics;
use splitrail_workload::pins::{Pin, ReadablePin};

use super::{PinPayload, ReadBack, release};
use crate::{ServedModel, Worker};
use splitrail_workload::Booking;

/// The bound on a worker's pinned blocks if the engine does not report how many blocks it has.
const UNKNOWN_BLOCKS_MAX: u64 = 1024;

/// KV that a decode leg has left pinned, with what is known of its tokens.
pub struct NewPin {
    /// What the engine said of it.
    pub kv: PinnedKv,
    /// The worker that keeps it.
    pub holder: Arc<Worker>,
    /// The first token of the prompt.
    pub first_token: u32,
    /// The hashes of the full blocks whose tokens are known; none, if the KV cannot be read back
    /// exactly.
    pub hashes: Vec<BlockHash>,
    /// When the engine's reply began to arrive: the blocks were not pinned later. (Of KV that cannot be
    /// read back, when the reply had arrived.)
    pub since: Instant,
}

impl ReadBack {
    /// Remembers pinned KV. Releases pins that will not be read: this one if it cannot be, those
    /// that it supersedes, and the oldest ones beyond the bounds.
    pub fn keep(served: &Arc<ServedModel>, metrics: &Arc<Metrics>, new_pin: NewPin) {
        let NewPin { kv, holder, first_token, mut hashes, since } = new_pin;
        let block_size = served.pool.block_size();
        let is_exact = kv.check(block_size).is_ok();
        // The engine has not computed the KV of more tokens than this.
        hashes.truncate((kv.tokens / block_size.max(1)) as usize);
        if !is_exact || served.pool.read_back.is_distrusted() {
            hashes.clear();
        }
        let process = holder.health.presence.restarts();
        let adapter_changes = holder.engine.facts.adapter_changes();
        let pin = Pin {
            hashes: hashes.into(),
            holder: holder.index,
            process,
            blocks: u32::try_from(kv.blocks()).unwrap_or(u32::MAX),
            ends: since + usable(served.config.read_back_pin),
            freed: since + served.config.read_back_pin,
            payload_bytes: kv.bytes(),
            payload: PinPayload {
                kv,
                process,
                adapter_changes,
                holder: Arc::clone(&holder),
                first_token,
            },
        };
        let blocks_max = blocks_max(served, &holder);
        let out = served.pool.read_back.store().keep(pin, blocks_max);
        release::release_in_background(served, metrics, out);
    }

    /// Takes pinned KV, to be read by a prefill leg.
    pub fn take(
        served: &Arc<ServedModel>,
        metrics: &Arc<Metrics>,
        found: ReadablePin,
    ) -> Option<PinReading> {
        let pin = served.pool.read_back.store().take(found)?;
        Some(PinReading {
            blocks: found.blocks,
            _booking: pin.payload.holder.book(None, 0, 0),
            pin: Some(pin),
            send_state: None,
            served: Arc::clone(served),
            metrics: Arc::clone(metrics),
        })
    }
}

/// Pinned KV that a prefill leg is about to read. If it is dropped before any byte of the leg was
/// sent, another leg may read it. Otherwise it is left alone, since an engine may be reading it, and
/// its blocks count as kept until its end.
pub struct PinReading {
    blocks: usize,
    /// The holder is not free of work, and so not to be stopped, while its blocks are read.
    _booking: Booking,
    pin: Option<Pin<PinPayload>>,
    send_state: Option<SendState>,
    served: Arc<ServedModel>,
    metrics: Arc<Metrics>,
}

impl PinReading {
    /// Number of leading blocks of the prompt that are read.
    pub fn blocks(&self) -> usize {
        self.blocks
    }

    /// The worker that keeps the blocks.
    pub fn holder(&self) -> Option<&Arc<Worker>> {
        self.pin.as_ref().map(|pin| &pin.payload.holder)
    }

    /// When the leg that reads must have ended: in the middle between the end of the time in which
    /// it may begin and the time at which the engine frees the blocks.
    pub fn deadline(&self) -> Option<Instant> {
        self.pin.as_ref().map(|pin| pin.ends + (pin.freed - pin.ends) / 2)
    }

    /// The prefill leg's `kv_transfer_params`, as JSON.
    pub fn json(&self) -> Option<String> {
        let block_size = self.served.pool.block_size();
        self.pin.as_ref()?.payload.kv.read_json(self.blocks, block_size)
    }

    /// The parameters are in the body to which `send_state` belongs.
    pub fn is_in(&mut self, send_state: SendState) {
        self.send_state = Some(send_state);
    }

    /// Gives the pin up after a failure. Returns whether the leg may have been sent.
    pub fn was_sent(mut self) -> bool {
        self.give_up()
    }

    /// Puts the pin back if no byte of the leg was sent. Otherwise it is left alone. Returns whether
    /// the leg may have been sent.
    fn give_up(&mut self) -> bool {
        let Some(pin) = self.pin.take() else { return true };
        let was_sent = self.send_state.as_ref().is_some_and(|send_state| !send_state.take_back());
        let mut store = self.served.pool.read_back.store();
        if was_sent {
            store.leave(&pin);
            drop(store);
            self.ended("left");
        } else if let Some(out) = store.put(pin) {
            drop(store);
            release::release_in_background(&self.served, &self.metrics, vec![out]);
        }
        was_sent
    }

    /// The prefill engine has answered: the pin has been read or is released.
    pub fn done(mut self) {
        self.pin = None;
        self.ended("read");
    }

    fn ended(&self, end: &str) {
        let labels = [self.served.name(), end];
        self.metrics.read_back_pins.with_label_values(&labels).inc();
    }
}

impl Drop for PinReading {
    fn drop(&mut self) {
        let _was_sent = self.give_up();
    }
}

/// The part of a pin's time in which it may be read. A tenth is kept as a margin, and at least six
/// seconds, since engines refuse a read in the last five.
fn usable(pin: Duration) -> Duration {
    const MARGIN_MIN: Duration = Duration::from_secs(6);
    pin.saturating_sub((pin / 10).max(MARGIN_MIN))
}

/// The number of blocks that a worker may keep pinned.
pub fn blocks_max(served: &ServedModel, holder: &Worker) -> u64 {
    let total = holder.load(Instant::now()).and_then(|load| load.total_blocks);
    let percent = u64::from(served.config.read_back_pinned_percent_max);
    total.map_or(UNKNOWN_BLOCKS_MAX, |blocks| blocks as u64 * percent / 100)
}

#[cfg(test)]
mod tests {
    use super::*;

    const S: Duration = Duration::from_secs(1);

    #[test]
    fn a_tenth_of_a_pin_s_time_is_kept_and_at_least_six_seconds() {
        assert_eq!(usable(480 * S), 432 * S);
        assert_eq!(usable(40 * S), 34 * S);
        assert_eq!(usable(3 * S), Duration::ZERO);
    }
}
