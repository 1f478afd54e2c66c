//! The router renders chats as its engines do, with all options of their start.

use std::fmt::Write as _;

use serde_json::{Value, json};
use splitrail_sim::{PromptDialect, TOKENIZER_CONFIG_JSON};
use splitrail_tests::cluster::eventually;
use splitrail_tests::{Cluster, Spec};

/// The simulated model's template as an engine of `PromptDialect::OtherTemplate` has it.
fn other_template() -> String {
    let config: Value = serde_json::from_str(TOKENIZER_CONFIG_JSON).unwrap();
    let template = config["chat_template"].as_str().unwrap();
    template.replace("<|im_start|>", "<|im_start|>role ")
}

/// The number of tokens that the router finds in a chat.
async fn tokens(cluster: &Cluster, chat: &Value) -> u64 {
    let headers = [("content-type", "application/json")];
    let told = cluster.admin.post_with("/admin/explain", &headers, chat.to_string()).await;
    assert_eq!(told.status, 200, "{}", told.text());
    told.json()["explanation"]["prompts"][0]["prompt_tokens"].as_u64().unwrap()
}

fn chat() -> Value {
    json!({"model": "sim", "max_tokens": 4, "messages": [{"role": "user", "content": "hello"}]})
}

#[tokio::test]
async fn a_worker_with_another_template_agrees_once_the_router_has_it() {
    let files = tempfile::tempdir().unwrap();
    let template = files.path().join("other.jinja");
    std::fs::write(&template, other_template()).unwrap();
    let cluster = Cluster::start(Spec {
        tokenizer_keys: format!(", chat_template: {:?}", template.display().to_string()),
        model: "canary: { timeout: 5s }".into(),
        engine: |_, config| config.dialect = PromptDialect::OtherTemplate,
        ..Spec::aggregated(1)
    })
    .await;
    eventually("the worker agrees", async || {
        let workers = cluster.admin.get("/admin/workers").await.json();
        let parity = workers["workers"][0]["parity"].clone();
        assert_ne!(parity, "mismatch", "{workers}");
        parity == "ok"
    })
    .await;
    let reply = cluster.http.post("/v1/chat/completions", &chat()).await;
    let told = reply.json()["usage"]["prompt_tokens"].as_u64().unwrap();
    assert_eq!(tokens(&cluster, &chat()).await, told);
}

#[tokio::test]
async fn a_reload_takes_another_template_and_another_text_of_it() {
    let cluster = Cluster::start(Spec::aggregated(1)).await;
    let before = tokens(&cluster, &chat()).await;
    let template = cluster.files.path().join("mine.jinja");
    std::fs::write(&template, "{{ messages[0].content }}").unwrap();
    let yaml = cluster.yaml.replace(" }\n    flow", ", chat_template: mine.jinja }\n    flow");
    assert_ne!(yaml, cluster.yaml);
    let report = cluster.reload(&yaml).await;
    assert_eq!(report.status, 200, "{}", report.text());
    assert_eq!(tokens(&cluster, &chat()).await, "hello".len() as u64);
    assert_ne!(before, "hello".len() as u64);
    std::fs::write(&template, "{{ messages[0].content }}, {{ messages[0].role }}").unwrap();
    let report = cluster.reload(&yaml).await.json();
    assert_eq!(report["renewed"], json!(["models[sim].tokenizer"]));
    assert_eq!(tokens(&cluster, &chat()).await, "hello, user".len() as u64);
    std::fs::remove_file(&template).unwrap();
    let refused = cluster.reload(&yaml).await;
    assert!(refused.status.as_u16() >= 400, "{}", refused.text());
    assert!(refused.text().contains("mine.jinja"), "{}", refused.text());
    assert_eq!(tokens(&cluster, &chat()).await, "hello, user".len() as u64, "nothing has changed");
}

#[tokio::test]
async fn formats_variables_and_hidden_tools_reach_the_template() {
    let files = tempfile::tempdir().unwrap();
    let template = files.path().join("spy.jinja");
    let mut source = String::new();
    source.write_str("{% if messages[0].content is string %}s{% else %}parts{% endif %}").unwrap();
    source.write_str("{{ mood }}{% if tools %}, with tools{% endif %}").unwrap();
    std::fs::write(&template, source).unwrap();
    let cluster = Cluster::start(Spec {
        tokenizer_keys: format!(", chat_template: {:?}", template.display().to_string()),
        ..Spec::aggregated(1)
    })
    .await;
    let mut asked = chat();
    asked["tools"] = json!([{"type": "function", "function": {"name": "f"}}]);
    asked["tool_choice"] = "none".into();
    assert_eq!(tokens(&cluster, &asked).await, "s, with tools".len() as u64);
    for (keys, prompt) in [
        ("chat_template_content_format: openai", "parts, with tools"),
        ("default_chat_template_kwargs: { mood: glad }", "sglad, with tools"),
        ("exclude_tools_when_tool_choice_none: true", "s"),
    ] {
        let yaml = cluster.yaml.replace(" }\n    flow", &format!(", {keys} }}\n    flow"));
        let report = cluster.reload(&yaml).await;
        assert_eq!(report.status, 200, "{}", report.text());
        assert_eq!(tokens(&cluster, &asked).await, prompt.len() as u64, "{keys}");
    }
    let yaml = cluster
        .yaml
        .replace(" }\n    flow", ", default_chat_template_kwargs: { mood: glad } }\n    flow");
    assert_eq!(cluster.reload(&yaml).await.status, 200);
    asked["chat_template_kwargs"] = json!({"mood": "sad, very"});
    assert_eq!(tokens(&cluster, &asked).await, "ssad, very, with tools".len() as u64);
}
