//! Any change of the configuration file is applied as a whole or not at all.

use std::sync::Arc;

use splitrail_tests::accounting::Dice;
use splitrail_tests::{Cluster, Spec};

use super::support::{but, without};

/// Texts that stand where others of their kind may.
const SWAPS: [(&str, &str); 14] = [
    ("aggregated", "prefill_first"),
    ("kind: kv_overlap", "kind: round_robin"),
    ("kind: kv_overlap", "kind: least_loaded"),
    ("block_size: 16", "block_size: auto"),
    ("block_size: 16", "block_size: 32"),
    ("aliases: [default]", "aliases: [other, more]"),
    ("id: w1", "id: w0"),
    ("id: w1", "id: w9"),
    ("id: w0", "id: w1"),
    ("role: both", "role: decode"),
    ("role: both", "role: prefill"),
    ("name: sim", "name: sam"),
    ("hash_seed: 7", "hash_seed: 9"),
    ("drain_grace: 5s", "drain_grace: 6s, n_max: 4"),
];

fn below(dice: &mut Dice, bound: usize) -> usize {
    dice.below(bound as u64) as usize
}

/// One thing that an editor or a template may do to a file.
fn mutate(yaml: &str, dice: &mut Dice) -> String {
    let lines: Vec<&str> = yaml.lines().collect();
    let line = below(dice, lines.len());
    match dice.below(6) {
        0 => {
            let kept = lines.iter().enumerate().filter(|(at, _)| *at != line);
            kept.map(|(_, line)| format!("{line}\n")).collect()
        }
        1 => {
            let twice = lines
                .iter()
                .enumerate()
                .flat_map(|(at, text)| std::iter::repeat_n(text, if at == line { 2 } else { 1 }));
            twice.map(|line| format!("{line}\n")).collect()
        }
        2 => {
            let mut chars: Vec<char> = yaml.chars().collect();
            let at = below(dice, chars.len());
            chars[at] = *dice.one_of(&['0', '9', ' ', ':', '{', '#', 'x', '"', '\t']);
            chars.into_iter().collect()
        }
        3 => {
            let at = below(dice, yaml.len());
            yaml.chars().take(at).collect()
        }
        _ => {
            let (from, to) = *dice.one_of(&SWAPS);
            yaml.replacen(from, to, 1)
        }
    }
}

#[tokio::test]
async fn a_mutated_file_is_applied_in_full_or_changes_nothing() {
    let cluster = Cluster::start(Spec::aggregated(2)).await;
    let core = &cluster.running.core;
    let file = cluster.files.path().join("splitrail.yaml");
    let variants = [
        cluster.yaml.clone(),
        without(&cluster.yaml, "id: w1,"),
        but(&cluster.yaml, "    workers:\n", "    lease: 9s\n    migrate: true\n    workers:\n"),
    ];
    let mut dice = Dice::new(23);
    let (mut taken, mut refused) = (0, 0);
    for turn in 0..300 {
        let mut yaml = dice.one_of(&variants).clone();
        for _ in 0..dice.below(3) {
            yaml = mutate(&yaml, &mut dice);
        }
        let before = core.serving();
        let rosters: Vec<_> = before.models.iter().map(|served| served.pool.roster()).collect();
        let reply = cluster.reload(&yaml).await;
        let (now, valid) =
            (core.serving(), splitrail_config::load(&file, splitrail_config::Parts::ALL));
        if reply.status == 200 {
            taken += 1;
            let config = valid.expect("what is taken over is valid").config;
            let (shown, loaded) = (&*now.config, &config);
            assert_eq!(serde_json::to_value(shown).unwrap(), serde_json::to_value(loaded).unwrap());
            for (served, model) in now.models.iter().zip(&config.models) {
                let mut here: Vec<_> =
                    served.pool.roster().iter().map(|worker| worker.config.clone()).collect();
                let mut wanted = model.workers.clone();
                here.sort_by(|a, b| a.id.cmp(&b.id));
                wanted.sort_by(|a, b| a.id.cmp(&b.id));
                assert_eq!(here, wanted, "turn {turn}\n{yaml}");
            }
        } else {
            refused += 1;
            assert_eq!(reply.status, 422, "turn {turn}: {}\n{yaml}", reply.text());
            assert!(Arc::ptr_eq(&before, &now), "turn {turn}\n{yaml}");
            for (served, roster) in now.models.iter().zip(&rosters) {
                assert!(Arc::ptr_eq(roster, &served.pool.roster()), "turn {turn}\n{yaml}");
            }
            // What the validator accepts is refused for nothing but what needs a restart.
            let problems = reply.json()["problems"].as_array().unwrap().clone();
            let restart = |problem: &serde_json::Value| {
                problem["message"].as_str().unwrap().contains("cannot change while")
            };
            assert!(!problems.is_empty());
            assert_eq!(
                valid.is_ok(),
                problems.iter().all(restart),
                "turn {turn}: {problems:?}\n{yaml}"
            );
        }
    }
    assert!(taken > 40 && refused > 40, "{taken} taken, {refused} refused");
    assert_eq!(cluster.reload(&cluster.yaml).await.status, 200);
    super::support::served(&cluster, "in the end").await;
    cluster.settle().await;
}
