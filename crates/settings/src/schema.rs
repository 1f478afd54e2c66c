//! Reads JSON Schemas in the form in which `schemars` generates them.

use serde_json::Value;

/// Follows `$ref` within the `root` schema. Members beside a reference (such as a key's own
/// description) are not part of the result.
pub(crate) fn follow<'s>(root: &'s Value, mut schema: &'s Value) -> &'s Value {
    while let Some(target) = schema.get("$ref").and_then(Value::as_str) {
        match target.strip_prefix('#').and_then(|pointer| root.pointer(pointer)) {
            Some(next) => schema = next,
            None => break,
        }
    }
    schema
}

/// The alternatives of a `oneOf` or `anyOf` that are not null, and whether null is one. For a
/// schema without alternatives, the schema itself.
pub(crate) fn alternatives<'s>(root: &'s Value, schema: &'s Value) -> (Vec<&'s Value>, bool) {
    let listed = schema.get("oneOf").or_else(|| schema.get("anyOf")).and_then(Value::as_array);
    let Some(listed) = listed else {
        let nullable = schema
            .get("type")
            .and_then(Value::as_array)
            .is_some_and(|types| types.iter().any(|name| name == "null"));
        return (vec![schema], nullable);
    };
    let mut nullable = false;
    let mut alternatives = Vec::new();
    for schema in listed {
        let schema = follow(root, schema);
        if schema.get("type").is_some_and(|name| name == "null") {
            nullable = true;
        } else if schema.get("oneOf").or_else(|| schema.get("anyOf")).is_some() {
            alternatives.extend(self::alternatives(root, schema).0);
        } else {
            alternatives.push(schema);
        }
    }
    (alternatives, nullable)
}

/// The type other than null.
pub(crate) fn type_name(schema: &Value) -> &str {
    match schema.get("type") {
        Some(Value::String(name)) => name,
        Some(Value::Array(names)) => {
            names.iter().filter_map(Value::as_str).find(|name| *name != "null").unwrap_or_default()
        }
        _ => "",
    }
}

/// The only allowed text, if there is one.
pub(crate) fn constant(schema: &Value) -> Option<&str> {
    schema.get("const").and_then(Value::as_str)
}

/// The value of `kind` that selects this alternative.
pub(crate) fn kind(schema: &Value) -> Option<&str> {
    schema.pointer("/properties/kind").and_then(constant)
}
