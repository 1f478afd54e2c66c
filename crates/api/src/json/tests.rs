//! Tests of edits, of texts that are not objects, and of shared tables of members.

use super::*;
use proptest::prelude::*;

#[test]
fn edits_leave_other_values_byte_for_byte() {
    let text = r#"{ "a" : 1.50e+3, "pro\u006dpt": "x\u00e9\/", "z": [ 1 , {"k":  null} ] }"#;
    let mut object = JsonObject::parse_str(text).unwrap();
    assert_eq!(object.raw("prompt"), Some(r#""x\u00e9\/""#));
    object.set("stream", "true");
    object.set("a", "2");
    assert_eq!(
        object.to_string(),
        r#"{"a":2,"prompt":"x\u00e9\/","z":[ 1 , {"k":  null} ],"stream":true}"#
    );
    assert!(object.remove("z"));
    assert!(!object.remove("z"));
    assert_eq!(object.raw("z"), None);
}

#[test]
fn a_body_that_is_not_an_object_is_refused_with_400() {
    for text in ["[]", "1", "\"x\"", "null", "{\"a\":1,\"a\":2}", "{} {}", ""] {
        assert_eq!(JsonObject::parse_str(text).unwrap_err().status(), 400, "{text}");
    }
}

#[test]
fn invalid_utf8_is_reported_anywhere_in_a_body() {
    for text in
        [&b"{\"a\":\"\xff\"}"[..], b"{\"\xc3\":1}", b"{\"a\":1}\x80", b"\xff", b"{\"a\":\xe9}"]
    {
        let error =
            JsonObject::parse_strictly(Bytes::from_static(text), 9, |_| Ok(())).unwrap_err();
        assert_eq!(error.status(), 400);
        assert_eq!(error.message(), "the body is not valid UTF-8");
    }
}

#[test]
fn a_body_is_refused_with_what_is_wrong_and_where() {
    let deep = format!("{{\"a\":{}", "[".repeat(1000));
    for (text, expected) in [
        (&*deep, "the body is nested too deeply (line 1, column 132)"),
        (r#"{"a":{"b":1,"b":2}}"#, "the body has a key twice in one object (line 1, column 15)"),
        (r#"{"a":1e999}"#, "the body has a number out of range (line 1, column 10)"),
        (r#"{"a":"#, "the body ends too early (line 1, column 5)"),
        ("{\"a\"\n 1}", "the body is not valid JSON (line 2, column 2)"),
        ("[1]", "a JSON object was expected"),
    ] {
        let refused = JsonObject::parse_strictly(Bytes::from(text.to_owned()), 64, |_| Ok(()));
        let error = refused.unwrap_err();
        assert_eq!((error.status().as_u16(), error.message()), (400, expected));
    }
}

#[test]
fn a_long_value_is_sent_from_where_it_came_in() {
    let long = format!("[\"{}\"]", "x".repeat(APART_BYTES));
    let text = format!(r#"{{"a":1,"messages":{long} , "b" : 2,"more":{long}}}"#);
    let mut object = JsonObject::parse(text.into()).unwrap();
    object.set("a", "3");
    object.set("c", "4");
    let mut parts = object.to_parts();
    assert_eq!(value_of(parts.clone()), value_of(object.to_bytes().into()));
    bytes::Buf::advance(&mut parts, r#"{"a":3,"messages":"#.len());
    let original = object.raw("messages").unwrap();
    assert!(bytes::Buf::chunk(&parts).starts_with(original.as_bytes()));
    assert_eq!(bytes::Buf::chunk(&parts).as_ptr(), original.as_ptr(), "not a copy");
}

fn value_of(parts: Parts) -> serde_json::Value {
    serde_json::from_slice(&parts.into_bytes()).unwrap()
}

#[test]
fn many_short_members_are_sent_from_where_they_came_in() {
    let members = (0..2000).map(|i| format!(r#""plain{i}" : [{i}], "esc\u0061ped{i}":"x""#));
    let text = format!(r#"{{"first":1,{},"last":[2] }}"#, members.collect::<Vec<_>>().join(","));
    let mut object = JsonObject::parse_str(&text).unwrap();
    object.set("plain1000", "null");
    object.remove("escaped1500");
    object.set("own", "true");
    let parts = object.to_parts();
    assert_eq!(value_of(parts.clone()), value_of(object.to_bytes().into()));
    let mut slices = [std::io::IoSlice::new(&[]); 16];
    let count = parts.slices_from(0, &mut slices);
    let (from, to) = (object.text.as_ptr() as usize, object.text.len());
    let is_original =
        |slice: &&std::io::IoSlice<'_>| (slice.as_ptr() as usize).wrapping_sub(from) < to;
    let copied: usize =
        slices[..count].iter().filter(|slice| !is_original(slice)).map(|slice| slice.len()).sum();
    assert!(count < 12 && copied < 200, "{count} parts, {copied} bytes of them are copies");
}

#[test]
fn copies_share_their_members_and_not_their_edits() {
    let mut object = JsonObject::parse_str(r#"{"a":1,"b":[2,3],"c":3}"#).unwrap();
    object.set("a", "10");
    let piece = object.piece(&object.raw("b").unwrap()[1..2]);
    let (mut left, mut right) = (object.clone(), object.clone());
    left.set_piece("b", piece);
    assert!(right.remove("a") && !right.remove("a"));
    right.set("d", "4");
    left.set("c", "30");
    assert!(Arc::ptr_eq(&left.members, &object.members));
    assert_eq!(object.to_string(), r#"{"a":10,"b":[2,3],"c":3}"#);
    assert_eq!(left.to_string(), r#"{"a":10,"b":2,"c":30}"#);
    assert_eq!(right.to_string(), r#"{"b":[2,3],"c":3,"d":4}"#);
    assert_eq!((right.raw("a"), right.raw("d")), (None, Some("4")));
    assert_eq!(right.retain(|key| key != "b"), 1);
    assert_eq!(right.to_string(), r#"{"c":3,"d":4}"#);
}

#[test]
fn an_object_has_a_bounded_number_of_members_at_every_depth() {
    let object = |members: usize| {
        let members = (0..members).map(|i| format!(r#""k{i}":0"#)).collect::<Vec<_>>();
        format!("{{{}}}", members.join(","))
    };
    for (text, members) in [
        (object(100), Some(100)),
        (object(101), None),
        (format!(r#"{{"a":[{}]}}"#, object(100)), Some(1)),
        (format!(r#"{{"a":[{}]}}"#, object(101)), None),
    ] {
        let mut charged = 0;
        let charge = |bytes| {
            charged = bytes;
            Ok(())
        };
        let parsed = JsonObject::parse_strictly(text.into(), 100, charge);
        match (parsed, members) {
            (Ok(object), Some(members)) => {
                assert_eq!(object.members().count(), members);
                assert_eq!(charged, members * MEMBER_BYTES);
            }
            (Err(error), None) => {
                assert_eq!((error.status().as_u16(), charged), (400, 0));
                let told = error.message();
                assert!(told.contains("more than 100 members"), "{told}");
                assert!(told.contains("limits.object_members_max") && told.contains("line 1"));
            }
            (_, members) => panic!("{members:?}"),
        }
    }
    let full = JsonObject::parse_strictly(object(100).into(), 100, |_| {
        Err(Error::new(ErrorKind::Overloaded, "no room"))
    });
    assert_eq!(full.unwrap_err().status(), 503);
}

proptest! {
    /// Holds for all edits, whether or not a copy shares the members.
    #[test]
    fn an_object_and_its_copies_are_edited_alike(
        steps in proptest::collection::vec((0usize..6, "[a-f]", any::<bool>()), 0..24),
    ) {
        let text = r#"{"a":1,"b":"x","\u0063":[1]}"#;
        let mut alone = JsonObject::parse_str(text).unwrap();
        let origin = JsonObject::parse_str(text).unwrap();
        let mut shared = origin.clone();
        let mut copies = Vec::new();
        for (what, key, copy) in steps {
            if copy {
                copies.push(shared.clone());
            }
            match what {
                0 => prop_assert_eq!(alone.remove(&key), shared.remove(&key)),
                1 => prop_assert_eq!(alone.retain(|k| k != key), shared.retain(|k| k != key)),
                n => {
                    alone.set(&key, n.to_string());
                    shared.set(&key, n.to_string());
                }
            }
            let value = |object: &JsonObject| value_of(object.to_bytes().into());
            prop_assert_eq!(value(&alone), value(&shared));
            prop_assert_eq!(alone.raw(&key), shared.raw(&key));
        }
        prop_assert_eq!(origin.to_string(), r#"{"a":1,"b":"x","c":[1]}"#);
    }

    #[test]
    fn members_survive_a_round_trip(
        keys in proptest::collection::btree_set(".{0,8}", 0..8), value in ".{0,20}"
    ) {
        let mut object = JsonObject::parse_str("{}").unwrap();
        for key in &keys {
            object.set(key, quote(&value));
        }
        let again = JsonObject::parse(object.to_bytes()).unwrap();
        prop_assert_eq!(again.members().count(), keys.len());
        let quoted = quote(&value);
        for key in &keys {
            prop_assert_eq!(again.raw(key), Some(quoted.as_str()));
        }
    }
}
