//! Divides a listener's connections among client addresses.

use std::collections::HashMap;
use std::net::IpAddr;

use tokio::task::Id;

use crate::admission::{SHARE_OF_FREE, client_prefix};

/// The open connections of a listener by client address. Like the connections, bounded by
/// `limits.connections_max`.
#[derive(Debug, Default)]
pub(super) struct Addresses {
    of_task: HashMap<Id, IpAddr>,
    held: HashMap<IpAddr, usize>,
}

impl Addresses {
    /// Whether an address may have one more connection if `free` places are free; `max` is the
    /// bound for one address, 0 means none.
    pub(super) fn has_room(&self, address: IpAddr, free: usize, max: usize) -> bool {
        let held = self.held.get(&client_prefix(address)).copied().unwrap_or(0);
        held < free.saturating_mul(SHARE_OF_FREE) && (max == 0 || held < max)
    }

    /// Notes that a task serves a connection of this address.
    pub(super) fn begins(&mut self, task: Id, address: IpAddr) {
        let address = client_prefix(address);
        self.of_task.insert(task, address);
        *self.held.entry(address).or_default() += 1;
    }

    /// Notes that the task has ended.
    pub(super) fn ends(&mut self, task: Id) {
        let Some(address) = self.of_task.remove(&task) else { return };
        if let Some(held) = self.held.get_mut(&address) {
            *held -= 1;
            if *held == 0 {
                self.held.remove(&address);
            }
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used)]
mod tests {
    use super::*;

    const PLACES: usize = 900;

    /// Takes connections for an address while possible; returns how many it then has.
    async fn fill(addresses: &mut Addresses, address: &str, max: usize) -> usize {
        let address: IpAddr = address.parse().unwrap();
        while addresses.has_room(address, PLACES - addresses.of_task.len(), max) {
            let task = tokio::task::JoinSet::new().spawn(std::future::ready(())).id();
            addresses.begins(task, address);
        }
        addresses.held.get(&client_prefix(address)).copied().unwrap_or(0)
    }

    #[tokio::test]
    async fn one_address_gets_nearly_all_places_and_leaves_some_for_others() {
        let mut addresses = Addresses::default();
        assert_eq!(fill(&mut addresses, "10.0.0.1", 0).await, PLACES * 8 / 9);
        assert!(fill(&mut addresses, "10.0.0.2", 0).await > 50);
        assert!(fill(&mut addresses, "2001:db8::1", 0).await > 5);
        let tasks: Vec<Id> = addresses.of_task.keys().copied().collect();
        tasks.into_iter().for_each(|task| addresses.ends(task));
        assert!(addresses.held.is_empty() && addresses.of_task.is_empty(), "nothing is left");
    }

    #[tokio::test]
    async fn an_address_gets_at_most_its_limit_of_places() {
        let mut addresses = Addresses::default();
        assert_eq!(fill(&mut addresses, "2001:db8::1", 20).await, 20);
        assert_eq!(fill(&mut addresses, "2001:db8::2", 20).await, 20, "one client_prefix");
        assert_eq!(fill(&mut addresses, "2001:db8:0:1::1", 20).await, 20, "another");
        assert_eq!(addresses.of_task.len(), 40);
    }
}
