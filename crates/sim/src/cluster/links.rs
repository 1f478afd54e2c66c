//! Transfers with a common sender or receiver.

use super::cost::{CostModel, ns};

/// The times at which each worker's link is free again. Transfers take turns: one that has to wait
/// starts when both ends are free, and then has them exclusively.
#[derive(Debug)]
pub(super) struct Links {
    sender_free_ns: Vec<u64>,
    receiver_free_ns: Vec<u64>,
}

impl Links {
    pub(super) fn new(senders: usize, receivers: usize) -> Self {
        Self { sender_free_ns: vec![0; senders], receiver_free_ns: vec![0; receivers] }
    }

    /// When a transfer that is requested now will be complete.
    pub(super) fn transfer(
        &mut self,
        sender: usize,
        receiver: usize,
        tokens: u32,
        now_ns: u64,
        cost: &CostModel,
    ) -> u64 {
        let start = now_ns.max(self.sender_free_ns[sender]).max(self.receiver_free_ns[receiver]);
        let free = start + ns(cost.link_s(tokens));
        self.sender_free_ns[sender] = free;
        self.receiver_free_ns[receiver] = free;
        start + cost.transfer_ns(tokens)
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
        assert_eq!(links.transfer(0, 0, 4, 0, &cost), 5 * s);
        assert_eq!(links.transfer(1, 1, 2, 0, &cost), 3 * s);
        assert_eq!(links.transfer(0, 1, 1, s, &cost), 4 * s + 2 * s);
        assert_eq!(links.transfer(1, 0, 1, 9 * s, &cost), 11 * s);
    }
}
