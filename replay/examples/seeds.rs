#![allow(missing_docs, clippy::unwrap_used, clippy::print_stdout)]
use splitrail_replay::*;
fn main() {
    let mut args = std::env::args().skip(1);
    let path = args.next().unwrap();
    let name = args.next().unwrap();
    let util: f64 = args.next().unwrap().parse().unwrap();
    let seeds: Vec<u64> = args.map(|a| a.parse().unwrap()).collect();
    let file = std::io::BufReader::new(std::fs::File::open(path).unwrap());
    let workload = trace::read(file, 512).unwrap();
    for seed in seeds {
        let scenario = Scenario { utilisation: Some(util), seed, ..Scenario::default() };
        let out = scenario.run(&workload, &Named::by_name(&name).unwrap());
        let r = Report::new(&name, &workload, &out);
        println!("{seed} {:16} {:5.2} {:5.2}, {:.3}/{:.3}/{:.2}/{:.2}, ({:.2}/{:.2}) , {:.4} u{:.2}", name, r.hit_percent, r.ceiling_percent,
            r.ttft.mean_s, r.ttft.p50_s, r.ttft.p90_s, r.ttft.p99_s, r.good30_percent, r.good5_percent, r.imbalance, r.utilisation);
    }
}
