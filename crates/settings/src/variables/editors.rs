//! The schema for editors, which see files before their variables are filled.

use serde_json::{Value as Json, json};

use crate::schema::{constant, kind};

/// The pattern of texts that name a variable.
const VARIABLE: &str = "\\$\\{";

/// The schema of files in which values may name variables: a number, for example, may also be a text
/// with a variable.
#[must_use]
pub fn schema_with_variables(mut schema: Json) -> Json {
    allow(&mut schema);
    schema
}

fn allow(schema: &mut Json) {
    match schema {
        Json::Array(items) => items.iter_mut().for_each(allow),
        Json::Object(members) => {
            for (name, member) in members.iter_mut() {
                // Defaults and examples are values and not schemas.
                if name != "default" && name != "examples" {
                    allow(member);
                }
            }
            allow_here(schema);
        }
        _ => {}
    }
}

/// Allows a variable in place of a value of one schema.
fn allow_here(schema: &mut Json) {
    if constant(schema).is_some() {
        return;
    }
    for name in ["oneOf", "anyOf"] {
        let Some(options) = schema.get_mut(name).and_then(Json::as_array_mut) else { continue };
        let is_choice = options.iter().any(|option| constant(option).is_some());
        let is_secret = options.iter().any(|option| kind(option) == Some("env"));
        if is_choice || is_secret {
            options.push(json!({ "type": "string", "pattern": VARIABLE }));
        }
    }
    let Some(types) = schema.get("type").cloned() else { return };
    let types = match types {
        Json::Array(types) => types,
        one => vec![one],
    };
    let is_any_of = |names: &[&str]| {
        types.iter().any(|name| name.as_str().is_some_and(|name| names.contains(&name)))
    };
    let pattern = schema.get("pattern").and_then(Json::as_str).map(str::to_owned);
    if let Some(pattern) = pattern {
        schema["pattern"] = format!("{pattern}|{VARIABLE}").into();
    } else if is_any_of(&["integer", "number", "boolean"]) && !is_any_of(&["string"]) {
        schema["type"] = types.into_iter().chain([json!("string")]).collect();
        schema["pattern"] = VARIABLE.into();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_of_every_type_may_be_variables_and_sections_may_not() {
        let schema = json!({"type": "object", "properties": {
            "count": {"type": "integer", "minimum": 1, "default": 7},
            "wait": {"type": "string", "format": "duration", "pattern": "^[0-9]+s$"},
            "name": {"type": "string"},
            "flow": {"oneOf": [{"type": "string", "const": "a"}, {"type": "string", "const": "b"}]},
            "ratio": {"type": ["number", "null"]},
        }});
        let allowed = schema_with_variables(schema);
        let property = |name: &str| &allowed["properties"][name];
        assert_eq!(allowed["type"], "object");
        assert_eq!(property("count")["type"], json!(["integer", "string"]));
        assert_eq!(property("count")["pattern"], VARIABLE);
        assert_eq!(
            (&property("count")["minimum"], &property("count")["default"]),
            (&json!(1), &json!(7))
        );
        assert_eq!(property("wait")["pattern"], "^[0-9]+s$|\\$\\{");
        assert_eq!(property("name"), &json!({"type": "string"}));
        assert_eq!(property("flow")["oneOf"][2]["pattern"], VARIABLE);
        assert_eq!(property("ratio")["type"], json!(["number", "null", "string"]));
    }
}
