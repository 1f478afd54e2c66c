//! Data-parallel ranks: each is a place of its own, with its own cache and queue.

mod chosen;
mod events;
mod flows;
mod shim;
mod support;
mod work;
