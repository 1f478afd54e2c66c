//! The known tokens before a chat's first image are those of the engine, whatever the model puts in
//! the image's place.

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use proptest::prelude::*;
use serde_json::{Value, json};
use splitrail_prompt::template::{ChatInput, ChatTemplate, SpecialTokens};
use splitrail_prompt::{ChatRequestView, ContentFormat, PromptError, PromptModel, PromptOptions};

/// Prints parts in their order, with a mark for images.
const IN_ORDER: &str = "{% for m in messages %}<|im_start|>{{ m.role }}\n{% if m.content is string \
    %}{{ m.content }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|image|>\
    {% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>\n{% endfor %}";

/// Prints images before the texts of their message.
const IMAGES_FIRST: &str = "{% for m in messages %}USER: {% if m.content is string %}{{ m.content \
    }}{% else %}{% for part in m.content %}{% if part.type == 'image' %}<|image|>{% endif %}\
    {% endfor %}{% for part in m.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}\
    {% endfor %}{% endif %}{{ '\n' }}{% endfor %}";

/// Mentions images at the very beginning.
const ANNOUNCED: &str = "{% set ns = namespace(images=0) %}{% for m in messages %}{% if m.content is \
    not string %}{% for part in m.content %}{% if part.type == 'image' %}{% set ns.images = \
    ns.images + 1 %}{% endif %}{% endfor %}{% endif %}{% endfor %}Images: {{ ns.images }}\n\
    {% for m in messages %}{{ m.role }}: {% if m.content is string %}{{ m.content }}{% else %}\
    {% for part in m.content %}{% if part.type == 'image' %}<|image|>{% else %}{{ part.text }}\
    {% endif %}{% endfor %}{% endif %}\n{% endfor %}";

/// Omits images.
const SILENT: &str = "{% for m in messages %}{{ m.role }}: {% for part in m.content %}{{ part.text \
    }}{% endfor %}\n{% endfor %}";

fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/tokenizer/model")
}

fn model(template: &str) -> PromptModel {
    let chat_template = Some(template.to_owned());
    let options = PromptOptions {
        chat_template,
        content_format: Some(ContentFormat::OpenAi),
        ..PromptOptions::default()
    };
    PromptModel::load(&folder(), options).unwrap()
}

fn known(model: &PromptModel, messages: &Value) -> Result<Vec<u32>, PromptError> {
    let body = json!({ "messages": messages });
    model.tokenize_before_media(ChatRequestView::from_body(body.as_object().unwrap())?, 0)
}

fn text(text: &str) -> Value {
    json!({"type": "text", "text": text})
}

fn image() -> Value {
    json!({"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}})
}

fn said(role: &str, parts: Vec<Value>) -> Value {
    json!({"role": role, "content": parts})
}

/// The prompt's text in the engine, with a placeholder in the place of each image.
fn engines_text(template: &str, messages: &Value, placeholder: &str) -> String {
    let mut messages = messages.clone();
    for message in messages.as_array_mut().unwrap() {
        for part in message["content"].as_array_mut().unwrap() {
            if part["type"] == "image_url" {
                *part = json!({"type": "image"});
            }
        }
    }
    let input = ChatInput {
        messages: &messages,
        tools: None,
        documents: None,
        add_generation_prompt: true,
        kwargs: None,
        now_unix_s: 0,
    };
    let template = ChatTemplate::compile(template, SpecialTokens::new()).unwrap();
    template.render(&input).unwrap().text.replace("<|image|>", placeholder)
}

const WORDS: &str = "[a-z]{0,9}| {1,3}|\n{1,3}|[0-9]{1,4}|[.,!?(]|é|日本|😀|'s";

static MODELS: LazyLock<Vec<(&str, PromptModel)>> = LazyLock::new(|| {
    [IN_ORDER, IMAGES_FIRST, ANNOUNCED].map(|template| (template, model(template))).into()
});

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn known_tokens_are_those_of_the_engine_for_any_placeholder(
        before in proptest::collection::vec(proptest::collection::vec(WORDS, 0..40), 0..4),
        own in proptest::collection::vec(WORDS, 0..30),
        behind in proptest::collection::vec(WORDS, 0..10),
        placeholder in "<img>[a ]{0,3}</img>|\n\n<image>\n\n|Picture 1: <img>|\\(<image>\\)|\\[IMG\\]|<s>|<\\|im_end\\|>",
        template in 0..3usize,
    ) {
        let mut messages: Vec<Value> =
            before.iter().map(|words| said("system", vec![text(&words.concat())])).collect();
        messages.push(said("user", vec![text(&own.concat()), image(), text(&behind.concat())]));
        messages.push(said("assistant", vec![text("I see.")]));
        messages.push(said("user", vec![image()]));
        let messages = Value::Array(messages);
        let (template, model) = &MODELS[template];
        let ids = known(model, &messages).unwrap();
        let engines = engines_text(template, &messages, &placeholder);
        let engines = model.tokenize_text(&engines, false).unwrap().ids;
        prop_assert!(engines.starts_with(&ids), "{} of {} tokens", ids.len(), engines.len());
    }
}

#[test]
fn nearly_all_of_the_text_before_an_image_is_known() {
    let long = "Some words, and a few more of them. ".repeat(20);
    let messages = json!([
        said("system", vec![text(&long)]),
        said("user", vec![text("What is on it?"), image()]),
    ]);
    for (template, before) in [
        (
            IN_ORDER,
            format!("<|im_start|>system\n{long}<|im_end|>\n<|im_start|>user\nWhat is on it?"),
        ),
        (IMAGES_FIRST, format!("USER: {long}\nUSER: ")),
    ] {
        let model = model(template);
        let all = model.tokenize_text(&before, false).unwrap().ids;
        let ids = known(&model, &messages).unwrap();
        assert!(all.starts_with(&ids));
        assert!(all.len() - ids.len() <= 3, "{} of {}", ids.len(), all.len());
    }
    // The text at the beginning depends on the number of images.
    assert!(known(&model(ANNOUNCED), &messages).unwrap().len() <= "Images: ".len());
}

#[test]
fn text_formats_end_before_the_message_with_the_image() {
    let long = "Some words, and a few more of them. ".repeat(20);
    let messages = json!([
        {"role": "system", "content": long},
        said("user", vec![text("What is on it?"), image()]),
    ]);
    let folder_with_text_template = tempfile::tempdir().unwrap();
    for file in std::fs::read_dir(folder()).unwrap() {
        let file = file.unwrap();
        let to = folder_with_text_template.path().join(file.file_name());
        std::fs::copy(file.path(), to).unwrap();
    }
    let template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}";
    let path = folder_with_text_template.path().join("chat_template.jinja");
    std::fs::write(path, template).unwrap();
    let options = PromptOptions::default();
    let own = PromptModel::load(folder_with_text_template.path(), options).unwrap();
    let all = own.tokenize_text(&format!("system: {long}\nuser: "), false).unwrap().ids;
    let ids = known(&own, &messages).unwrap();
    assert!(all.starts_with(&ids) && all.len() - ids.len() <= 3, "{} {}", ids.len(), all.len());
    // A template from the configuration may be for a model that begins every prompt with its
    // images.
    let options =
        PromptOptions { chat_template: Some(template.to_owned()), ..PromptOptions::default() };
    let other = PromptModel::load(folder_with_text_template.path(), options).unwrap();
    assert!(matches!(known(&other, &messages), Err(PromptError::Unsupported(_))));
}

#[test]
fn nothing_is_known_where_an_image_may_be_anywhere() {
    let user = |parts| json!([said("system", vec![text("Be brief. ")]), said("user", parts)]);
    let model = model(IN_ORDER);
    assert!(known(&model, &user(vec![text("a"), image()])).is_ok());
    for messages in [
        // The engine takes the first text that looks like a placeholder for one.
        user(vec![text("see <|image|>"), image()]),
        json!([said("system", vec![text("<image>")]), said("user", vec![image()])]),
        json!([said("user", vec![text("a")]), said("tool", vec![image()])]),
        user(vec![text("a"), json!({"type": "file", "file": {}})]),
        user(vec![text("a"), image(), json!({"type": "prompt_embeds", "prompt_embeds": ""})]),
    ] {
        let got = known(&model, &messages);
        assert!(matches!(got, Err(PromptError::Unsupported(_))), "{messages}: {got:?}");
    }
    let silent = self::model(SILENT);
    let got = known(&silent, &user(vec![text("a"), image()]));
    assert!(matches!(got, Err(PromptError::Unsupported(_))), "{got:?}");
}
