//! `replay`: policies on a cluster in virtual time.

fn main() -> Result<(), splitrail_bench::replay::Failure> {
    splitrail_bench::replay::main()
}
