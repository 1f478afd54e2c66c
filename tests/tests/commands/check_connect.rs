//! `splitrail check --connect`: the shipped program against simulated engines, each of them wrong in
//! one respect, and against servers that are no engines.

mod addresses;
mod engines;
mod hand_offs;
mod hostile;
#[cfg(feature = "packaging")]
mod networks;
mod output;
mod shims;
mod support;
