//! `fleet`: what many workers, and a router that starts again, cost.

fn main() -> Result<(), splitrail_bench::fleet::Failure> {
    splitrail_bench::fleet::main()
}
