//! Transfers with a common sender or receiver.

use super::cost::{CostModel, ns};
use super::router::Peer;

/// The times at which each worker's link is free again, in each direction. Transfers take turns:
/// one that has to wait starts when both ends are free, and then has them exclusively.
#[derive(Debug)]
pub(super) struct Links {
    prefill_workers: usize,
    outgoing_free_ns: Vec<u64>,
    incoming_free_ns: Vec<u64>,
}

impl Links {
    pub(super) fn new(prefill_workers: usize, decode_workers: usize) -> Self {
        let free_ns = vec![0; prefill_workers + decode_workers];
        Self { prefill_workers, outgoing_free_ns: free_ns.clone(), incoming_free_ns: free_ns }
    }

    fn at(&self, peer: Peer) -> usize {
        match peer {
            Peer::Prefill(worker) => worker,
            Peer::Decode(worker) => self.prefill_workers + worker,
        }
    }

    /// When a worker's link is free to send.
    pub(super) fn outgoing_free_ns(&self, peer: Peer) -> u64 {
        self.outgoing_free_ns[self.at(peer)]
    }

    /// When a worker's link is free to receive.
    pub(super) fn incoming_free_ns(&self, peer: Peer) -> u64 {
        self.incoming_free_ns[self.at(peer)]
    }

    /// Occupies the outgoing link of a worker for a transfer that waits for no other.
    pub(super) fn occupy(&mut self, sender: Peer, tokens: u32, now_ns: u64, cost: &CostModel) {
        let sender = self.at(sender);
        let free_ns = now_ns + ns(cost.link_s(tokens));
        self.outgoing_free_ns[sender] = self.outgoing_free_ns[sender].max(free_ns);
    }

    /// When a transfer that is requested now will begin, and when it will be complete. `base_s` is the
    /// time that it takes without occupying the links, in seconds.
    pub(super) fn transfer(
        &mut self,
        (sender, receiver): (Peer, Peer),
        tokens: u32,
        base_s: f64,
        now_ns: u64,
        cost: &CostModel,
    ) -> (u64, u64) {
        let (sender, receiver) = (self.at(sender), self.at(receiver));
        let free_ns = self.outgoing_free_ns[sender].max(self.incoming_free_ns[receiver]);
        let start = now_ns.max(free_ns);
        let free = start + ns(cost.link_s(tokens));
        self.outgoing_free_ns[sender] = free;
        self.incoming_free_ns[receiver] = free;
        (start, start + ns(base_s + cost.link_s(tokens)))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn transfers_wait_only_for_transfers_with_a_common_worker() {
        let cost = CostModel {
            transfer_base_s: 1.0,
            kv_bytes_per_token: 1.0,
            transfer_bytes_per_s: 1.0,
            ..CostModel::default()
        };
        let mut links = Links::new(2, 2);
        let s = 1_000_000_000;
        let mut ready_ns = |sender, receiver, tokens, now_ns| {
            links.transfer((sender, receiver), tokens, cost.transfer_base_s, now_ns, &cost).1
        };
        let (prefill, decode) = (Peer::Prefill, Peer::Decode);
        assert_eq!(ready_ns(prefill(0), decode(0), 4, 0), 5 * s);
        assert_eq!(ready_ns(prefill(1), decode(1), 2, 0), 3 * s);
        assert_eq!(ready_ns(prefill(0), decode(1), 1, s), 4 * s + 2 * s);
        assert_eq!(ready_ns(prefill(1), decode(0), 1, 9 * s), 11 * s);
        // A fetch by the first worker, whose outgoing link does not matter.
        assert_eq!(ready_ns(prefill(1), prefill(0), 1, 9 * s), 10 * s + 2 * s);
        assert_eq!(ready_ns(decode(1), prefill(0), 1, 9 * s), 11 * s + 2 * s);
    }
}
