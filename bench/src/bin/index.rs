//! `index`: compares the prefix index with two public ones.

use splitrail_bench::index::alloc::Counting;

#[global_allocator]
static ALLOCATOR: Counting = Counting;

fn main() -> Result<(), Box<dyn std::error::Error>> {
    splitrail_bench::index::main()
}
