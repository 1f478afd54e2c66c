//! Networks that let nothing pass, as the system shows them: on a machine with routes of its own.

use serde_json::Value;
use splitrail_tests::binary::built;
use splitrail_tests::machine::Machine;

const CHECK: &str = "
ip route add prohibit 10.9.0.1
ip route add unreachable 10.9.0.2
splitrail check --connect --json - <<'END' || [ $? = 69 ]
listen: { http: 127.0.0.1:0, admin: 127.0.0.1:0 }
models:
  - name: sim
    tokenizer: { kind: none }
    block_size: 16
    workers:
      - { id: prohibited, role: both, url: \"http://10.9.0.1:8000\" }
      - { id: rejected, role: both, url: \"http://10.9.0.2:8000\" }
      - { id: nowhere, role: both, url: \"http://10.9.0.3:8000\" }
END
";

#[test]
fn a_network_that_lets_no_connection_pass_is_named_with_what_to_change() {
    let Some(machine) = Machine::with_hosts(&[]) else { return };
    machine.install(&built("splitrail"));
    let printed: Value = serde_json::from_str(&machine.run(CHECK)).unwrap();
    let workers = printed["models"][0]["workers"].as_array().unwrap();
    for (worker, cause) in
        workers.iter().zip(["Permission denied", "No route to host", "Network is unreachable"])
    {
        let [finding] = &worker["findings"].as_array().unwrap()[..] else { panic!("{worker:#}") };
        assert_eq!(finding["kind"], "unreachable", "{finding:#}");
        let what = finding["what"].as_str().unwrap();
        assert!(what.contains("http://10.9.0.") && what.contains(cause), "{what}");
        assert!(finding["remedy"].as_str().unwrap().contains("firewalls and network policies"));
    }
    assert_eq!(workers.len(), 3);
}
