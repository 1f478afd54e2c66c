//! The body of a chat request, all the way to its text and tokens, with
//! templates of several families.

use std::sync::LazyLock;

use serde_json::Value;
use splitrail_prompt::template::{ChatInput, ChatTemplate, SpecialTokens};
use splitrail_prompt::{ChatRequestView, PromptError, PromptModel, PromptOptions};

const FOLDER: &str =
    concat!(env!("CARGO_MANIFEST_DIR"), "/../crates/prompt/tests/fixtures/tokenizer");

static MODELS: LazyLock<Vec<PromptModel>> = LazyLock::new(|| {
    ["chatml", "headers", "thinking", "alternating", "parts", "python"].map(model).into()
});

/// Uses values as no checked conversation lets a template use them.
static CARELESS: LazyLock<ChatTemplate> = LazyLock::new(|| {
    let source = "{% for m in messages %}{{ m.role ~ m.content }}{{ m|tojson }}{{ m }}\
        {% for key, value in m|items %}{{ key|upper }}{{ value|trim|length }}{{ value[1:] }}\
        {% endfor %}{% endfor %}{{ messages|tojson(indent=2) }}";
    ChatTemplate::compile(source, SpecialTokens::new()).expect("it is a template")
});

fn model(template: &str) -> PromptModel {
    let template = std::fs::read_to_string(format!("{FOLDER}/templates/{template}.jinja"));
    let chat_template = Some(template.expect("the template is there"));
    let options = PromptOptions { chat_template, ..PromptOptions::default() };
    PromptModel::load(format!("{FOLDER}/model").as_ref(), options).expect("the model is there")
}

pub(crate) fn check(data: &[u8]) {
    let Ok(body) = serde_json::from_slice::<Value>(data) else {
        return;
    };
    let careless = ChatInput {
        messages: body.get("messages").unwrap_or(&body),
        tools: None,
        documents: None,
        add_generation_prompt: true,
        kwargs: None,
        now_unix_s: 0,
    };
    let rendered = CARELESS.render(&careless).ok();
    assert_eq!(rendered, CARELESS.render(&careless).ok());

    let Some(body) = body.as_object() else {
        return;
    };
    let Ok(view) = ChatRequestView::from_body(body) else {
        return;
    };
    for model in MODELS.iter() {
        let rendered = model.render_chat(view.clone(), 0);
        match model.tokenize_chat(view.clone(), 0) {
            Ok(prompt) => {
                assert!(rendered.is_ok_and(|rendered| rendered.uses_clock == prompt.uses_clock));
                let vocabulary = model.tokenizer.vocab_size;
                assert!(prompt.ids.iter().all(|id| (*id as usize) < vocabulary));
            }
            Err(PromptError::Client(message)) => assert!(message.chars().count() <= 500),
            Err(PromptError::Unsupported(_)) => {}
            Err(PromptError::Internal(message)) => panic!("no request may break this: {message}"),
        }
    }
}
