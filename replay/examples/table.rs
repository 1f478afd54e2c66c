#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]
use splitrail_replay::*;
use std::time::Instant;
fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap();
    let util: f64 = args.next().unwrap().parse().unwrap();
    let cap: usize = args.next().unwrap().parse().unwrap();
    let seed: u64 = args.next().unwrap().parse().unwrap();
    let names: Vec<String> = args.collect();
    let file = std::io::BufReader::new(std::fs::File::open(path).unwrap());
    let start = Instant::now();
    let workload = trace::read(file, 512).unwrap();
    println!("read {:?}", start.elapsed());
    let mut scenario = Scenario { utilisation: Some(util), seed, ..Scenario::default() };
    scenario.cluster.prefill_cache_blocks = cap;
    for name in Named::names() {
        if !names.is_empty() && !names.iter().any(|n| n == name) {
            continue;
        }
        let start = Instant::now();
        let out = scenario.run(&workload, &Named::by_name(name).unwrap());
        let ran = start.elapsed();
        let r = Report::new(name, &workload, &out);
        println!(
            "{:16} {:5.1} {:5.1}, {:.2}/{:.2}/{:.1}/{:.1}, ({:.0}/{:.0}) {:.1}/{:.1}, {:.3} u{:.2} [{:?} {:?}]",
            name,
            r.hit_percent,
            r.ceiling_percent,
            r.ttft.mean_s,
            r.ttft.p50_s,
            r.ttft.p90_s,
            r.ttft.p99_s,
            r.good30_percent,
            r.good5_percent,
            r.good30_percent,
            r.good5_percent,
            r.imbalance,
            r.utilisation,
            ran,
            start.elapsed() - ran
        );
    }
}
