//! The bounds of what a template may write: they follow from the length of the conversation, and
//! hold while a filter writes.

use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use splitrail_prompt::template::{
    ChatInput, ChatTemplate, SpecialTokens, TemplateError, rendered_max_bytes,
};
use splitrail_prompt::watch::{self, Watch};

fn render(source: &str, tools: &Value) -> Result<String, TemplateError> {
    let template = ChatTemplate::compile(source, SpecialTokens::new())?;
    let input = ChatInput {
        messages: &json!([]),
        tools: Some(tools),
        documents: None,
        add_generation_prompt: true,
        kwargs: None,
        now_unix_s: 0,
    };
    Ok(template.render(&input)?.text)
}

/// A list of zeros within 90 lists: with an indentation of four, each zero takes 370 bytes.
fn deep(zeros: usize) -> Value {
    (0..90).fold(json!(vec![0; zeros]), |inner, _| json!([inner]))
}

fn is_too_long(result: &Result<String, TemplateError>) -> bool {
    matches!(result, Err(TemplateError::TooMuch("the size of a prompt")))
}

#[test]
fn a_filter_ends_where_its_text_is_longer_than_a_prompt_may_be() {
    // Nothing of the long text would be in the prompt.
    let written = render("{{ tools|tojson(indent=4)|length }}", &deep(10_000));
    assert!(is_too_long(&written), "{written:?}");
    let lines = json!("\n".repeat(100_000));
    let indented = render("{{ tools|indent(60, blank=true)|length }}", &lines);
    assert!(is_too_long(&indented), "{indented:?}");
    let separated = "{{ tools|tojson(separators=['x' * 1000, ':'])|length }}";
    assert!(is_too_long(&render(separated, &json!(vec![0; 10_000]))));
}

#[test]
fn a_prompt_ends_where_it_is_much_longer_than_its_conversation() {
    let repeated = "{% for tool in tools %}{{ tools }}{% endfor %}";
    assert!(is_too_long(&render(repeated, &json!(vec![0; 2_000]))));
    assert_eq!(render(repeated, &json!(vec![0; 100])).unwrap().len(), 100 * 300);
}

#[test]
fn a_text_is_not_repeated_to_more_than_100_mb() {
    let repeated = |times: u32| render(&format!("{{{{ ('ab' * {times})|length }}}}"), &json!([]));
    assert_eq!(repeated(1_000_000).unwrap(), "2000000");
    assert!(matches!(repeated(50_000_001), Err(TemplateError::Render { .. })));
}

#[test]
fn a_short_conversation_leaves_room_for_the_text_of_its_template() {
    let text = "a".repeat(200_000);
    assert_eq!(render(&text, &json!([])).unwrap(), text);
}

fn watched(abandoned: bool, template_max: Duration, source: &str) -> Result<String, TemplateError> {
    let members: Map<String, Value> = (0..1000).map(|n| (n.to_string(), json!(n))).collect();
    let abandoned = Some(Arc::new(AtomicBool::new(abandoned)));
    watch::with(Watch { abandoned, template_max }, || render(source, &Value::Object(members)))
}

#[test]
fn a_filter_ends_with_the_time_of_its_template_and_with_its_client() {
    let long = Duration::from_secs(3600);
    for source in [
        "{{ tools|tojson|length }}",
        "{% set x = tools|string|replace(',', '\n') %}{{ x|indent|length }}",
    ] {
        for (abandoned, template_max) in [(false, Duration::ZERO), (true, long)] {
            let stopped = watched(abandoned, template_max, source);
            assert!(matches!(stopped, Err(TemplateError::TooMuch("processor time"))), "{source}");
        }
        watched(false, long, source).unwrap();
    }
}

#[test]
fn lists_are_not_printed_with_what_is_not_python_s_pprint() {
    assert!(render("{{ tools|pprint }}", &deep(1)).is_err());
}

fn value() -> impl Strategy<Value = Value> {
    let leaf = prop_oneof![
        (0..10).prop_map(Value::from),
        any::<bool>().prop_map(Value::from),
        "[a-z ]{0,60}".prop_map(Value::from),
        Just(Value::Null),
    ];
    leaf.prop_recursive(12, 60, 6, |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..6).prop_map(Value::from),
            prop::collection::btree_map("[a-z]{1,12}", inner, 0..6).prop_map(Value::from_iter),
        ]
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]

    #[test]
    fn what_becomes_at_most_eight_times_as_long_is_rendered(value in value()) {
        // As many as it takes for the template's own allowance to matter little.
        let copies = 100_000 / value.to_string().len() + 1;
        let tools = json!(vec![value; copies]);
        let json_bytes = tools.to_string().len();
        let mut plain = Vec::new();
        let indentation = serde_json::ser::PrettyFormatter::with_indent(b"    ");
        let mut writer = serde_json::Serializer::with_formatter(&mut plain, indentation);
        serde::Serialize::serialize(&tools, &mut writer).unwrap();
        let rendered = render("{{ tools|tojson(indent=4) }}", &tools);
        if plain.len() <= rendered_max_bytes(json_bytes) {
            prop_assert_eq!(rendered.unwrap(), String::from_utf8(plain).unwrap());
        } else if plain.len() > rendered_max_bytes(2 * json_bytes) {
            prop_assert!(is_too_long(&rendered));
        }
    }
}
