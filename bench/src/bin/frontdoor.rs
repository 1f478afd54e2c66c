//! `frontdoor`: the cost of a request in the router, compared with nginx and other routers.

fn main() -> Result<(), splitrail_bench::frontdoor::Failure> {
    splitrail_bench::frontdoor::main()
}
