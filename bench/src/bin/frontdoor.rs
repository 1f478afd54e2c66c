//! `frontdoor`: measures what a request costs the router, compared with nginx and another router.

fn main() -> Result<(), splitrail_bench::frontdoor::Failure> {
    splitrail_bench::frontdoor::main()
}
