//! `replay`: compares placement policies on a simulated cluster.

fn main() -> Result<(), splitrail_bench::replay::Failure> {
    splitrail_bench::replay::main()
}
