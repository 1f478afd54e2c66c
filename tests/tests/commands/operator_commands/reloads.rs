//! `reload` on all routers.

use super::support::{Routers, run};

fn edit(routers: &Routers, place: usize, from: &str, to: &str) {
    let path = routers.config(place);
    let text = std::fs::read_to_string(&path).unwrap();
    assert!(text.contains(from), "{text}");
    std::fs::write(&path, text.replace(from, to)).unwrap();
}

#[tokio::test]
async fn a_reload_reports_for_each_router_what_has_changed() {
    let routers = Routers::start(2).await;
    let same = run(&["reload", "--admin", &routers.admins()]).await;
    assert_eq!(same.code, 0, "{same:?}");
    assert!(same.line(&routers.name(1)).contains("unchanged"), "{same:?}");
    for place in 0..2 {
        edit(&routers, place, "flow: prefill_first", "flow: decode_first");
    }
    let changed = run(&["reload", "--admin", &routers.admins()]).await;
    assert_eq!(changed.code, 0, "{changed:?}");
    assert!(changed.line(&routers.name(1)).contains(": changed"), "{changed:?}");
    let flow = "  models[sim].flow: \"prefill_first\" -> \"decode_first\"";
    assert_eq!(changed.stdout.lines().filter(|line| *line == flow).count(), 2, "{changed:?}");
}

#[tokio::test]
async fn a_reload_that_one_router_refuses_names_the_mistake_and_is_seen_in_the_status() {
    let routers = Routers::start(2).await;
    edit(&routers, 0, "flow: prefill_first", "flow: decode_first");
    edit(&routers, 1, "flow: prefill_first", "flow: prefil_first");
    let reloaded = run(&["reload", "--admin", &routers.admins()]).await;
    assert_eq!(reloaded.code, 75, "{reloaded:?}");
    assert!(reloaded.stdout.contains("splitrail.yaml:"), "{reloaded:?}");
    assert!(reloaded.stdout.contains("did you mean `prefill_first`?"), "{reloaded:?}");
    reloaded.line("incomplete: reloaded on 1 of 2 routers");
    let told = run(&["reload", "--admin", &routers.name(1), "--json"]).await;
    assert_eq!(told.code, 65, "{told:?}");
    assert!(told.json()["replicas"][0]["problems"][0]["line"].is_u64(), "{told:?}");
    let status = run(&["status", "--admin", &routers.admins()]).await;
    assert_eq!(status.code, 1, "{status:?}");
    let refused = format!("{}: the last reload was refused", routers.name(1));
    status.line(&refused);
    assert!(status.stdout.contains("run different configurations"), "{status:?}");
    edit(&routers, 1, "flow: prefil_first", "flow: decode_first");
    assert_eq!(run(&["reload", "--admin", &routers.admins()]).await.code, 0);
    assert_eq!(run(&["status", "--admin", &routers.admins()]).await.code, 0);
}
