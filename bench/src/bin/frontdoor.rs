//! `frontdoor`: what the router costs a request, beside nginx and other routers.

fn main() -> Result<(), splitrail_bench::frontdoor::Failure> {
    splitrail_bench::frontdoor::main()
}
