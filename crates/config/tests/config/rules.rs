//! Rules between keys, and between the configuration and the world outside.

use crate::support::{VALID, only_problem, parse, valid_but};

/// Asserts that the change makes the file wrong in one way, at one place.
fn refused(from: &str, to: &str, at: (usize, usize), part: &str) {
    let (line, column, told) = only_problem(&valid_but(from, to));
    assert!(told.contains(part), "{to}: {told}");
    assert_eq!((line, column), at, "{to}: {told}");
}

fn accepted(text: &str) {
    if let Err(problems) = parse(text) {
        panic!("{problems}\n{text}");
    }
}

#[test]
fn names_lead_to_one_model() {
    refused(
        "name: small",
        "name: big",
        (32, 11),
        "`models[1].name` \"big\" is already taken at 11:11",
    );
    refused("name: small", "name: my-lora", (32, 11), "is already taken at 13:16");
    refused("[default]", "[default, default]", (12, 24), "is already taken at 12:15");
    refused("[my-lora]", "[big]", (13, 16), "is already taken at 11:11");
    refused("[default]", "['']", (12, 15), "is empty or too long");
    refused("name: small", "name: 'small '", (32, 11), "white space");
}

#[test]
fn origins_are_written_as_browsers_send_them() {
    let listed = |origins: &str| {
        VALID.replacen("listen:", &format!("listen:\n  http_origins: [{origins}]"), 1)
    };
    accepted(&listed("'*', https://chat.example, 'http://10.0.0.1:3000'"));
    for wrong in ["chat.example", "https://chat.example/", "https://Chat.example", "''"] {
        let (_, _, told) = only_problem(&listed(wrong));
        assert!(told.contains("`listen.http_origins[0]`") && told.contains("no origin"), "{told}");
    }
}

#[test]
fn a_model_opens_no_field_that_only_the_router_may_set() {
    let opened = |names: &str| format!("name: small\n    pass_unknown: [{names}]");
    accepted(&valid_but("name: small", &opened("priority, made_up")));
    for name in ["kv_transfer_params", "bootstrap_anything", "rid"] {
        let part = format!("`models[1].pass_unknown[1]` \"{name}\" can be set by the router only");
        refused("name: small", &opened(&format!("priority, {name}")), (33, 30), &part);
    }
}

#[test]
fn no_worker_is_a_listener_of_the_router() {
    for host in ["127.0.0.1", "localhost", "[::1]"] {
        let url = format!("http://{host}:8000");
        refused("http://10.0.1.1:8000", &url, (31, 38), "is this router's own `listen.http`");
    }
    accepted(&valid_but("http://10.0.1.1:8000", "http://localhost:8123"));
}

#[test]
fn worker_ids_and_addresses_are_unique_in_a_model() {
    refused(
        "id: d0",
        "id: p0",
        (31, 15),
        "`models[0].workers[1].id` \"p0\" is already taken at 26:13",
    );
    refused("http://10.0.1.1", "http://10.0.0.1", (31, 38), "is already taken at 28:14");
    let events = ", kv_events: \"tcp://10.0.0.1:5557\" }";
    let twice = valid_but("1.1:8000\" }", &format!("1.1:8000\"{events}"));
    let (line, _, told) = only_problem(&twice);
    assert!(line == 31 && told.contains("each engine publishes its own events"), "{told}");
    accepted(&valid_but("id: w0", "id: p0"));
    accepted(&valid_but("http://10.0.2.1", "http://10.0.0.1"));
    // One port speaks either HTTP or HTTPS.
    refused("http://10.0.1.1", "https://10.0.0.1", (31, 38), "is already taken at 28:14");
    for host in ["localhost", "[::1]", "0.0.0.0"] {
        let twin = valid_but("http://10.0.0.1:8000", "http://127.0.0.1:9000");
        let twin = twin.replacen("http://10.0.1.1:8000", &format!("http://{host}:9000"), 1);
        assert!(only_problem(&twin).2.contains("is already taken at 28:14"), "{host}");
    }
}

#[test]
fn engine_addresses_are_plain() {
    let url = "http://10.0.0.1:8000";
    accepted(&valid_but(url, "https://10.0.0.1:8000"));
    refused(url, "ftp://10.0.0.1:8000", (28, 14), "has another scheme");
    refused(url, "https://10.0.0.1", (28, 14), "has no port");
    refused(url, "http://10.0.0.1:8000/v1", (28, 14), "has a path");
    refused(url, "http://10.0.0.1", (28, 14), "has no port");
    refused(url, "10.0.0.1:8000", (28, 14), "has no scheme");
    refused("tcp://10.0.0.1:5557", "\"tcp://*:5557\"", (29, 20), "what an engine binds");
    refused("tcp://10.0.0.1:5558", "http://10.0.0.1:5558", (30, 20), "`tcp://HOST:PORT`");
    accepted(&valid_but(url, "\"http://[fd00::1]:8000\""));
}

#[test]
fn replay_needs_events() {
    let events = "        kv_events: tcp://10.0.0.1:5557\n";
    let text = valid_but(events, "").replace(
        "kind: kv_overlap, overlap_weight: 2, load_weight: 0.5, temperature: 0.1",
        "kind: round_robin",
    );
    let (line, column, told) = only_problem(&text);
    assert_eq!((line, column), (29, 20));
    assert!(told.contains("of no use without `kv_events`"), "{told}");
}

#[test]
fn flows_have_the_workers_they_need() {
    refused("role: prefill", "role: decode", (26, 7), "no worker with role prefill or both");
    refused("role: decode,", "role: prefill,", (26, 7), "no worker with role decode or both");
    refused("role: both", "role: prefill", (36, 7), "no worker with role decode or both");
    refused(
        "connector: nixl",
        "connector: none",
        (17, 16),
        "`models[0].flow: prefill_first` needs",
    );
    // NIXL is the default between prefill and decode workers.
    accepted(&valid_but("    connector: nixl\n", ""));
    accepted(&valid_but("role: both", "role: decode"));
    accepted(&valid_but("role: prefill", "role: both"));
    accepted(&valid_but("flow: aggregated", "flow: aggregated\n    connector: nixl"));
}

#[test]
fn hand_off_networks_are_networks_and_nixl_s() {
    let nixl = |list: &str| format!("connector: nixl\n    hand_off_networks: {list}");
    accepted(&valid_but("connector: nixl", &nixl("[10.0.0.0/8, \"fd00::/8\", 192.168.1.7]")));
    refused(
        "connector: nixl",
        &nixl("[10.0.0.0/8, 10.0.0.0/99]"),
        (18, 37),
        "`models[0].hand_off_networks[1]` \"10.0.0.0/99\" is not an IP network",
    );
    accepted(&valid_but("connector: nixl", &nixl("[10.0.0.0/8]").replace("nixl", "nixl_push")));
    let other = nixl("[10.0.0.0/8]").replace("nixl", "mooncake");
    refused("connector: nixl", &other, (18, 24), "without `connector: nixl` or `nixl_push`");
}

#[test]
fn bootstrap_servers_are_those_of_prefill_workers_that_have_one() {
    let with = |connector: &str, role: &str, bootstrap: &str| {
        let text = valid_but("connector: nixl", &format!("connector: {connector}"));
        let (from, to) = match role {
            "prefill" => {
                ("role: prefill", format!("role: prefill\n        bootstrap: {bootstrap}"))
            }
            _ => ("role: decode", format!("role: decode, bootstrap: \"{bootstrap}\"")),
        };
        text.replacen(from, &to, 1)
    };
    accepted(&with("mooncake", "prefill", "http://10.0.0.1:9000"));
    for (text, part) in [
        (with("mooncake", "decode", "http://10.0.0.1:9000"), "`bootstrap` is of no use"),
        (with("nixl_push", "prefill", "http://10.0.0.1:9000"), "`bootstrap` is of no use"),
        (with("nixl", "prefill", "http://10.0.0.1:9000"), "`bootstrap` is of no use"),
        (with("mooncake", "prefill", "10.0.0.1:9000"), "`bootstrap` has no scheme"),
    ] {
        let (_, _, told) = only_problem(&text);
        let part = part.replace("`bootstrap`", "bootstrap`");
        assert!(told.contains(&part), "{told}");
    }
}

#[test]
fn flows_that_requests_may_ask_for_have_the_workers_they_need() {
    let small = |flows: &str| {
        valid_but("flow: aggregated", &format!("flow: aggregated\n    request_flows: [{flows}]"))
    };
    accepted(&small("decode_only, aggregated"));
    let (line, column, told) = only_problem(&small("decode_only, sideways"));
    assert_eq!((line, column), (35, 34), "{told}");
    let problems = crate::support::problems(&small("decode_first"));
    let told: Vec<_> = problems.iter().map(|problem| problem.message.as_str()).collect();
    assert_eq!(
        told,
        [
            "`models[1].request_flows[0]: decode_first` needs a connector",
            "`models[1].workers` has one worker, decode_first needs two",
        ]
    );
    for flow in ["decode_first", "auto"] {
        accepted(&valid_but("flow: prefill_first", &format!("flow: {flow}")));
        refused(
            "flow: prefill_first\n    connector: nixl",
            &format!("flow: {flow}\n    connector: none"),
            (17, 16),
            &format!("`models[0].flow: {flow}` needs a connector"),
        );
    }
}

#[test]
fn sglang_serves_pairs_only() {
    let valid = valid_but("connector: nixl", "connector: sglang").replacen(
        "    local_prefill_max_tokens: 32\n",
        "",
        1,
    );
    accepted(&valid);
    accepted(&valid.replacen("    block_size: 16\n", "", 1));
    let local = "    local_prefill_max_tokens: 1\n    retries";
    for (from, to, part) in [
        ("on_no_prefill: fail", "on_no_prefill: local", "on_no_prefill: local`"),
        ("    on_no_prefill: fail\n", "", "add `on_no_prefill: fail`"),
        ("    retries", local, "local_prefill_max_tokens`"),
        ("role: prefill", "role: both", "role: both`"),
        ("flow: prefill_first", "flow: decode_first", "flow: decode_first` is not possible"),
        (
            "kind: huggingface, path: tokenizer",
            "kind: engine",
            "tokenizer: engine` is not possible with SGLang",
        ),
    ] {
        assert!(valid.contains(from), "{from}");
        let (_, _, told) = only_problem(&valid.replacen(from, to, 1));
        assert!(told.contains(part), "{told}");
    }
}

#[test]
fn an_engine_has_the_connector_that_is_to_move_its_kv() {
    accepted(&valid_but("connector: nixl", "connector: nixl\n    engine: vllm"));
    for (connector, engine, hint) in [
        ("nixl", "sglang", "SGLang moves KV with `connector: sglang`"),
        ("nixl_push", "sglang", "SGLang moves KV with `connector: sglang`"),
        ("mooncake", "sglang", "SGLang moves KV with `connector: sglang`"),
        ("sglang", "vllm", "delete `engine`"),
    ] {
        let keys = format!("connector: {connector}\n    engine: {engine}");
        let valid = valid_but("connector: nixl", &keys);
        let (_, _, told) =
            only_problem(&valid.replacen("    local_prefill_max_tokens: 32\n", "", 1));
        let what = format!("engine: {engine}` is not possible with `connector: {connector}`");
        assert!(told.contains(&what) && told.contains(hint), "{told}");
    }
}

#[test]
fn a_gate_has_what_it_looks_at() {
    let with = |gate: &str| {
        let keys = format!("flow: decode_first\n    gate: {gate}");
        valid_but("flow: prefill_first", &keys)
    };
    accepted(&with("{ kind: auto, preemption_guard: 0.001 }"));
    accepted(&with("{ kind: engine, index_first: false, index_margin_blocks: 0 }"));
    let blind =
        with("{ kind: router }").replacen("role: decode,", "role: decode, kv_events: none,", 1);
    let (line, column, told) = only_problem(&blind);
    assert_eq!((line, column), (17, 19), "{told}");
    assert!(told.contains("sees no decode worker's KV events"), "{told}");
    let (_, _, told) = only_problem(&with("{ kind: shim }"));
    assert!(told.contains("has no decode worker with `shim: true`"), "{told}");
    accepted(&with("{ kind: shim }").replace("role: decode,", "role: decode, shim: true,"));
    for (gate, part) in [
        ("{ preemption_guard: 2 }", "from 0 to 1"),
        ("{ index_first: 1 }", "must be true or false"),
        ("{ kind: nobody }", "one of: auto, engine, shim, router"),
    ] {
        let (_, _, told) = only_problem(&with(gate));
        assert!(told.contains(part), "{told}");
    }
    refused(
        "flow: prefill_first",
        "flow: auto\n    cache_hit_threshold: 1.5",
        (17, 26),
        "cannot be 1.5 -> from 0 to 1",
    );
}

#[test]
fn decode_first_without_anybody_to_look_is_a_warning() {
    let warned = |text: &str| {
        let loaded = parse(text).unwrap_or_else(|problems| panic!("{problems}"));
        let told = loaded.warnings.iter().map(|warning| warning.message.clone());
        told.filter(|message| message.contains("can only be gated by the engines")).count()
    };
    let text = valid_but("flow: prefill_first", "flow: decode_first");
    assert_eq!(warned(&text), 0, "the engine is asked where it publishes");
    let events = |value: &str| format!("role: decode, kv_events: {value},");
    let with = |value: &str| text.replacen("role: decode,", &events(value), 1);
    assert_eq!(warned(&with("none")), 1);
    assert_eq!(warned(&with("\"tcp://d:1\"")), 0);
    let engine = "flow: decode_first\n    gate: { kind: engine }";
    assert_eq!(warned(&valid_but("flow: prefill_first", engine)), 0);
    assert_eq!(warned(VALID), 0);
}

#[test]
fn kv_overlap_needs_tokens_and_events() {
    let policy = "flow: aggregated\n    policy: { kind: kv_overlap }";
    let with_events = valid_but("flow: aggregated", policy)
        .replace("http://10.0.2.1:8000\"", "http://10.0.2.1:8000\", kv_events: \"tcp://w:1\"");
    let (_, _, told) = only_problem(&with_events);
    assert!(told.contains("needs a tokenizer"), "{told}");
    let tokenizer = "{ kind: huggingface, path: tokenizer }";
    accepted(&with_events.replace("{ kind: none }", tokenizer));
    let without = with_events.replace("{ kind: none }", tokenizer).replace("\"tcp://w:1\"", "none");
    let loaded = parse(&without).unwrap();
    let [warning] = loaded.warnings.as_slice() else { panic!("{:?}", loaded.warnings) };
    assert_eq!((warning.line, warning.column), (35, 13));
    assert!(warning.message.contains("no worker whose KV events it sees"), "{warning:?}");
    let off = format!("{policy}\n    speculative_index: {{ approximate_ttl: 0s }}");
    let (line, column, told) = only_problem(&without.replace(policy, &off));
    assert_eq!((line, column), (35, 13));
    assert!(told.contains("no worker whose KV events it sees"), "{told}");
}

#[test]
fn the_speculative_index_has_lifetimes_and_a_bound() {
    let with = |index: &str| {
        valid_but("flow: aggregated", &format!("flow: aggregated\n    speculative_index: {index}"))
    };
    let parsed = |text: &str| parse(text).unwrap().config.models[1].speculative_index;
    let default = parsed(VALID);
    assert_eq!((default.speculative_ttl.as_secs(), default.approximate_ttl.as_secs()), (2, 120));
    let off = parsed(&with("{ speculative_ttl: 0s }"));
    assert!(off.speculative_ttl.is_zero() && off.approximate_ttl == default.approximate_ttl);
    for (index, part) in [
        ("{ specluative_ttl: 1s }", "did you mean `speculative_ttl`?"),
        ("{ approximate_ttl: 120 }", "`models[1].speculative_index.approximate_ttl`"),
        ("{ blocks_max: 0 }", "`models[1].speculative_index.blocks_max`"),
    ] {
        let (line, _, told) = only_problem(&with(index));
        assert!(line == 35 && told.contains(part), "{line}: {told}");
    }
}

#[test]
fn listeners_do_not_take_each_others_ports() {
    refused("grpc: 0.0.0.0:8001", "grpc: 0.0.0.0:8000", (3, 9), "takes the port of `listen.http`");
    refused("grpc: 0.0.0.0:8001", "grpc: 127.0.0.1:8000", (3, 9), "takes the port of");
    refused("grpc: 0.0.0.0:8001", "grpc: '[::]:8000'", (3, 9), "takes the port of");
    refused("http: 0.0.0.0:8000", "http: 0.0.0.0:9090", (4, 10), "`listen.admin` takes the port");
    let metrics = |port: u16| format!("grpc: 0.0.0.0:8001, metrics: 0.0.0.0:{port}");
    let metrics = |port| metrics(port).replace(", ", "\n  ");
    refused("grpc: 0.0.0.0:8001", &metrics(8001), (4, 12), "`listen.metrics` takes the port of");
    // Metrics may be public.
    assert!(parse(&valid_but("grpc: 0.0.0.0:8001", &metrics(9091))).unwrap().warnings.is_empty());
    accepted(&VALID.replace("0.0.0.0:8000\n", "127.0.0.1:0\n").replace(":8001", ":0"));
    accepted(
        &VALID
            .replace("0.0.0.0:8000\n", "127.0.0.2:8001\n")
            .replace("0.0.0.0:8001", "127.0.0.1:8001"),
    );
}

#[test]
fn an_admin_address_that_others_reach_is_a_warning() {
    let loaded = parse(&valid_but("127.0.0.1:9090", "0.0.0.0:9090")).unwrap();
    let [warning] = loaded.warnings.as_slice() else { panic!("{:?}", loaded.warnings) };
    assert_eq!((warning.line, warning.column), (4, 10));
    assert!(warning.message.contains("can be reached from other hosts"));
    assert!(parse(VALID).unwrap().warnings.is_empty());
}

#[test]
fn an_explain_that_clients_reach_is_a_warning() {
    let warnings = |grpc: &str| {
        let listen = format!("grpc: {grpc}\n  grpc_explain: true");
        let loaded = parse(&valid_but("grpc: 0.0.0.0:8001", &listen)).unwrap();
        assert!(loaded.config.listen.grpc_explain);
        loaded.warnings
    };
    let [warning] = &warnings("0.0.0.0:8001")[..] else { panic!("no warning") };
    assert!(warning.message.contains("other clients' load"), "{}", warning.message);
    assert!(warnings("127.0.0.1:8001").is_empty());
    let [warning] = &warnings("null")[..] else { panic!("no warning") };
    assert!(warning.message.contains("does nothing"), "{}", warning.message);
}

#[test]
fn durations_are_within_the_bounds_of_their_schema() {
    let limit = |limit: &str| valid_but("drain_delay: 250ms", limit);
    let queue = |key: &str| valid_but("name: big", &format!("name: big\n    queue: {{ {key} }}"));
    for text in [limit("idle_timeout: 10ms"), limit("drain_delay: 0s"), queue("lead: 60s")] {
        accepted(&text);
    }
    for (text, at, part) in [
        (
            limit("idle_timeout: 9ms"),
            (8, 17),
            "`limits.idle_timeout` cannot be 9ms -> from 10ms to 168h",
        ),
        (queue("lead: 61s"), (12, 20), "`models[0].queue.lead` cannot be 61s -> from 0s to 1m"),
        (
            queue("ttft_goal: 0s"),
            (12, 25),
            "`models[0].queue.ttft_goal` cannot be 0s -> from 1ms to 168h",
        ),
    ] {
        let (line, column, told) = only_problem(&text);
        assert_eq!(((line, column), told.as_str()), (at, part));
    }
}

#[test]
fn tokenizers_and_secrets_must_be_there() {
    let engine = |keys: &str| {
        valid_but("kind: huggingface, path: tokenizer", &format!("kind: engine{keys}"))
    };
    accepted(&engine(", timeout: 1s, in_flight_max: 1, cache_size: 0"));
    refused("path: tokenizer", "path: nowhere", (15, 43), "\"nowhere\" does not exist");
    refused("path: tokenizer", "path: .", (15, 43), "has no `tokenizer.json`");
    accepted(&valid_but("path: tokenizer", "path: tokenizer/tokenizer.json"));
    let template = "path: tokenizer, chat_template: tokenizer/nowhere.jinja";
    let what = "`models[0].tokenizer.chat_template` \"tokenizer/nowhere.jinja\" is not a file";
    refused("path: tokenizer", template, (15, 69), what);
    let kwargs =
        "path: tokenizer, default_chat_template_kwargs: { enable_thinking: false, tools: [] }";
    let what = "default_chat_template_kwargs.tools` is not a template's variable";
    refused("path: tokenizer", kwargs, (15, 110), what);
    accepted(&valid_but("path: tokenizer", &kwargs.replace("tools: []", "depth: 2")));
    let format = "path: tokenizer, chat_template_content_format: open_ai";
    refused("path: tokenizer", format, (15, 84), "did you mean `openai`");
    refused("path: engine.key", "path: nowhere.key", (24, 21), "file cannot be read");
    refused("path: engine.key", "path: .", (24, 21), "file cannot be read");
    refused("path: engine.key", "path: valid.yaml", (24, 21), "no header can carry");
    let key = "{ kind: file, path: engine.key }";
    refused(key, "{ kind: env, name: SPLITRAIL_TEST_UNSET }", (24, 21), "is not set");
    refused(key, "{ kind: env, name: 'A=B' }", (24, 21), "is not set");
    accepted(&valid_but(key, "{ kind: env, name: PATH }"));
    accepted(&valid_but(key, "null"));
}

#[test]
fn the_ledger_file_has_a_folder_to_be_in() {
    let path = "path: ledger.jsonl";
    refused(path, "path: nowhere/ledger.jsonl", (38, 9), "is in a folder that does not exist");
    refused(path, "path: tokenizer", (38, 9), "is not a file");
    refused(path, "path: ''", (38, 9), "is not a file");
    let parsed = parse(VALID).unwrap().config.ledger;
    assert!(parsed.path.unwrap().ends_with("tests/fixtures/config/ledger.jsonl"));
    assert_eq!((parsed.rotate.max_bytes, parsed.rotate.files_max), (1 << 20, 4));
}

/// `check` finds what would end the start.
#[test]
fn the_other_files_of_lines_have_a_folder_to_be_in() {
    for section in ["record", "audit", "access_log"] {
        let text = format!("{VALID}{section}:\n  path: nowhere/{section}.jsonl\n");
        let (_, _, told) = only_problem(&text);
        let part = format!("`{section}.path` \"nowhere/{section}.jsonl\" is in a folder that does");
        assert!(told.contains(&part), "{told}");
    }
}

#[test]
fn limits_leave_room() {
    let told = "`limits.request_memory_max` (1MiB) is less than `limits.body_size_max` (32MiB)";
    refused("body_size_max: 1MiB", "request_memory_max: 1MiB", (7, 23), told);
}

#[test]
fn read_back_has_what_it_needs() {
    let with = |keys: &str| {
        let keys = format!("flow: prefill_first\n    {keys}");
        valid_but("flow: prefill_first", &keys)
    };
    accepted(&with("read_back: true"));
    accepted(&with("read_back: true\n    read_back_pin: 40s"));
    for (text, part) in [
        (
            with("read_back: true").replacen("hash_seed: 7", "hash_seed: 0", 1),
            "a secret `hash_seed`",
        ),
        (with("read_back: true\n    read_back_pinned_percent_max: 0"), "1 to 90"),
        (
            with("read_back: true\n    kv_load_failure_policy: recompute"),
            "needs `kv_load_failure_policy: fail`",
        ),
        (
            with("read_back: true").replacen("connector: nixl", "connector: mooncake", 1),
            "`connector: nixl`",
        ),
    ] {
        let (_, _, told) = only_problem(&text);
        assert!(told.contains(part), "{told}");
    }
}
