//! Pairs of legs of SGLang (`connector: sglang`): both engines meet in a room at the bootstrap server
//! of the prefill worker.

use splitrail_api::error::Error;
use splitrail_engine::connectors::sglang_room::Room;
use splitrail_fleet::Worker;

use super::bootstrap;
use crate::params::RoomMembers;

/// The members by which both bodies name a room that no other pair has.
///
/// # Errors
/// The address of the bootstrap server is not known.
pub(super) fn make_room(prefill: &Worker) -> Result<RoomMembers, Error> {
    let bootstrap = bootstrap(prefill)?;
    Ok(random_room().into_members(bootstrap.host(), bootstrap.port()))
}

fn random_room() -> Room {
    Room::from_random(rand::random())
}

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use super::*;

    #[test]
    fn a_million_pairs_have_a_million_different_rooms() {
        const PAIRS: usize = 1_000_000;
        let rooms: HashSet<u64> = (0..PAIRS).map(|_| random_room().number()).collect();
        assert_eq!(rooms.len(), PAIRS);
    }
}
