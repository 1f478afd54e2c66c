//! `fleet`: measures the cost of many workers and of a router's restart.

fn main() -> Result<(), splitrail_bench::fleet::Failure> {
    splitrail_bench::fleet::main()
}
