use proptest::prelude::*;

use super::*;
use serde_json::{Value, json};

fn boundary(text: &str) -> Boundary {
    let kind = format!("multipart/form-data; boundary=\"{text}\"");
    Boundary::of_content_type(kind.as_bytes()).unwrap()
}

fn read_form(body: &[u8]) -> Result<(Value, Recording), Error> {
    let body = Bytes::copy_from_slice(body);
    let (object, recording) = read(&body, &boundary("b"), boundary("e"))?;
    Ok((serde_json::from_slice(&object.to_bytes()).unwrap(), recording))
}

/// A form whose parts have these heads and contents.
fn form(parts: &[(&str, &str)]) -> String {
    let parts = parts.iter().map(|(head, content)| format!("--b\r\n{head}\r\n\r\n{content}\r\n"));
    parts.collect::<String>() + "--b--\r\n"
}

fn text(name: &str) -> String {
    format!("Content-Disposition: form-data; name=\"{name}\"")
}

const RECORDING: &str =
    "Content-Disposition: form-data; name=\"file\"; filename=\"a.wav\"\r\nContent-Type: audio/wav";

fn refused(body: &str, message: &str) {
    let error = read_form(body.as_bytes()).expect_err(body);
    assert_eq!(error.status().as_u16(), 400, "{error}");
    assert!(error.message().contains(message), "{body:?}: {error}");
}

#[test]
fn a_boundary_is_read_from_a_content_type_and_only_one() {
    for (value, read) in [
        ("multipart/form-data; boundary=abc", "abc"),
        ("Multipart/Form-Data ;Boundary=abc; charset=utf-8", "abc"),
        ("multipart/form-data; boundary=\"a b=c\"", "a b=c"),
        (
            "multipart/form-data;boundary=----WebKitFormBoundary7MA4YWxk",
            "----WebKitFormBoundary7MA4YWxk",
        ),
        ("multipart/form-data; boundary=----=_Part_1.2", "----=_Part_1.2"),
    ] {
        let found = Boundary::of_content_type(value.as_bytes()).expect(value);
        assert_eq!(&*found.0, read, "{value}");
    }
    let long = format!("multipart/form-data; boundary={}", "a".repeat(71));
    for value in [
        "",
        "multipart/form-data",
        "multipart/form-data;",
        "multipart/form-data; boundary=",
        "multipart/form-data; boundary=\"\"",
        "multipart/form-data; boundary=a; boundary=b",
        "multipart/form-data; boundary=a; BOUNDARY=a",
        "multipart/form-data; boundary=\"a",
        "multipart/form-data; boundary=\"a \"",
        "multipart/form-data; boundary=a\"b",
        "multipart/form-data; boundary=a b",
        "multipart/form-data; boundary=\"a\r\nb\"",
        "multipart/form-data, boundary=a",
        "multipart/mixed; boundary=a",
        "application/json; boundary=a",
        "application/x-www-form-urlencoded",
        &long,
    ] {
        assert_eq!(Boundary::of_content_type(value.as_bytes()), None, "{value}");
    }
    assert_ne!(Boundary::random(), Boundary::random());
}

#[test]
fn forms_of_well_known_clients_are_read() {
    for (disposition, name) in [
        // curl, httpx, fetch.
        ("form-data; name=\"file\"; filename=\"speech one.wav\"", "speech_one.wav"),
        ("form-data; name=\"file\"; filename=\"a\\\"b.wav\"", "a_b.wav"),
        ("form-data; name=\"file\"; filename=\"Gespr%C3%A4ch.wav\"", "Gespr_C3_A4ch.wav"),
        ("form-data; name=\"file\"; filename=\"C:/x/é.wav\"", "_.wav"),
        // .NET
        ("form-data; name=file; filename=a.wav; filename*=utf-8''a.wav", "a.wav"),
        // Python's requests
        ("form-data; name=\"file\"; filename*=utf-8''%C3%A9.wav", "file"),
        ("form-data; name=\"file\"; filename=\"\"", "file"),
    ] {
        let head = format!("content-disposition: {disposition}\r\nContent-Length: 3");
        let (_, recording) = read_form(form(&[(&head, "abc")]).as_bytes()).expect(disposition);
        assert_eq!((&*recording.file_name, &recording.bytes[..]), (name, &b"abc"[..]));
    }
    let encoded = "Content-Type: text/plain; charset=UTF-8\r\nContent-Transfer-Encoding: 8bit";
    let body = form(&[
        (&format!("{}\r\n{encoded}", text("prompt")), "a \u{e9}\r\n--c\r\n\""),
        (&text("timestamp_granularities[]"), "word"),
        (&text("temperature"), "0.20"),
        (RECORDING, ""),
        (&text("timestamp_granularities[]"), "segment"),
        (&text("cache_hit_threshold"), "0.5"),
        (&text("vllm_xargs"), " {\"a\": 1} "),
    ]);
    let (fields, recording) = read_form(body.as_bytes()).unwrap();
    let expected = json!({
        "prompt": "a \u{e9}\r\n--c\r\n\"", "temperature": "0.20", "vllm_xargs": {"a": 1},
        "timestamp_granularities[]": ["word", "segment"],
    });
    assert_eq!((fields, &*recording.file_name), (expected, "a.wav"));
    let long = format!("{}.wav", "x".repeat(100));
    assert_eq!(plain_file_name(&long), format!("{}.wav", "x".repeat(60)));
}

#[test]
fn what_a_form_may_not_be_is_refused_where_it_is() {
    let good = form(&[(RECORDING, "abc")]);
    for (body, message) in [
        (String::new(), "does not begin with the boundary"),
        (format!("\r\n{good}"), "does not begin with the boundary"),
        (format!("preamble\r\n{good}"), "does not begin with the boundary"),
        (
            good.replace("--b\r\n", "--b \r\n"),
            "part 1 begins or ends with a boundary that has characters after it",
        ),
        (good.replace("--b\r\n", "--bc\r\n"), "part 1 begins or ends with a boundary"),
        (good.replace("--b--\r\n", "--b\r\n"), "part 2 does not end with the boundary"),
        (good.replace("--b--\r\n", "--b-\r\n"), "part 2 begins or ends with a boundary"),
        (format!("{good}x"), "part 2 begins or ends with a boundary"),
        (format!("{good}{good}"), "part 2 begins or ends with a boundary"),
        (good.replace("\r\n", "\n"), "part 1 begins or ends with a boundary"),
        (form(&[(RECORDING, "abc\r\n--bx")]), "part 2 begins or ends with a boundary"),
        (form(&[]), "`file` is missing"),
        (form(&[(&text("model"), "m")]), "`file` is missing"),
        (form(&[(RECORDING, ""), (RECORDING, "")]), "`file` is given twice"),
        (form(&[(&text("file"), "abc")]), "`file` must be a file"),
        (form(&[(&RECORDING.replace("\"file\"", "\"model\""), "m")]), "part 1 is a file; only"),
        (
            form(&[(&text("model"), "m"), (&text("model"), "m")]),
            "part 2 has a name that an earlier",
        ),
        (form(&[(&text("cache_salt"), "m")]), "no `cache_salt`"),
        (form(&[(&text("vllm_xargs"), "x"), (RECORDING, "")]), "`vllm_xargs` must be an object"),
        (
            form(&[(&text("vllm_xargs"), "{}, \"a\": {}"), (RECORDING, "")]),
            "`vllm_xargs` must be an object",
        ),
        (form(&[(&text("vllm_xargs"), "[{}]"), (RECORDING, "")]), "`vllm_xargs` must be an object"),
        (form(&[("Content-Type: text/plain", "m")]), "part 1 needs `content-disposition"),
        (form(&[("Content-Disposition: form-data", "m")]), "part 1 needs `content-disposition"),
        (form(&[("Content-Disposition: attachment; name=\"a\"", "")]), "part 1 needs"),
        (form(&[("Content-Disposition: form-data; name=\"a\"; name=\"b\"", "")]), "part 1 needs"),
        (form(&[("Content-Disposition: form-data; name=\"a\\\"b\"", "")]), "part 1 needs"),
        (form(&[("Content-Disposition: form-data; name=\"a\"; x=y", "")]), "part 1 needs"),
        (form(&[("Content-Disposition: form-data; name=\"é\"", "")]), "part 1 needs"),
        (form(&[("Content-Disposition: form-data; name=\"a", "")]), "part 1 needs"),
        (form(&[(&format!("{0}\r\n{0}", text("a")), "")]), "part 1 has two `content-disposition`"),
        (form(&[(&format!("{}\r\n folded", text("a")), "")]), "part 1 has a line in its head"),
        (form(&[(&format!("{}\r\nx: a\nb: c", text("a")), "")]), "that is no header field"),
        (form(&[(&format!("{}\r\nx : a", text("a")), "")]), "that is no header field"),
        (
            form(&[(&format!("{}\r\nContent-Transfer-Encoding: base64", text("a")), "")]),
            "part 1 is encoded",
        ),
        (
            form(&[(&format!("{}\r\nContent-Type: multipart/mixed; boundary=c", text("a")), "")]),
            "or parts of its own",
        ),
        (form(&[(&text(&"a".repeat(3000)), "")]), "has no head of at most 2 KiB"),
        (form(&vec![(RECORDING, ""); 65]), "more than 64 parts"),
        (form(&[(&text("prompt"), &"a".repeat(65_536))]), "more than 65536 bytes"),
    ] {
        refused(&body, message);
    }
    let error =
        read_form(b"--b\r\nContent-Disposition: form-data; name=\"a\"\r\n\r\n\xff\r\n--b--");
    assert!(error.unwrap_err().message().contains("part 1 is not UTF-8"));
}

/// A text that looks like the framing of a form.
fn tricky() -> impl Strategy<Value = String> {
    const PIECES: [&str; 14] =
        ["\r\n", "--b", "--", "b", "\r", "\n", "\"", "\\", ": ", "é", "{}", "[", "x", ""];
    prop::collection::vec(prop::sample::select(&PIECES[..]), 0..12).prop_map(|some| some.concat())
}

proptest! {
    #[test]
    fn what_is_written_for_engines_reads_back_the_same(
        texts in prop::collection::vec(tricky(), 0..5),
        list in prop::collection::vec(tricky(), 1..4),
        file in prop::collection::vec(any::<u8>(), 0..200),
        end in tricky(),
        file_name in "\\PC{0,80}",
    ) {
        let mut fields = Builder::with_capacity(16);
        for (i, text) in texts.iter().enumerate() {
            fields.put_text(&format!("a{i}"), text);
        }
        fields.put("b[]", &list);
        let fields = fields.build();
        let bytes = Bytes::from([&file[..], end.as_bytes()].concat());
        let for_engine = Boundary::random();
        let file_name = plain_file_name(&file_name);
        let recording = Recording { file_name, bytes, boundary: for_engine.clone() };
        let kind = recording.content_type().unwrap();
        prop_assert_eq!(Boundary::of_content_type(kind.as_bytes()), Some(for_engine.clone()));
        let written = recording.write(&fields).into_bytes();
        let (read_fields, again) = read(&written, &for_engine, boundary("e")).unwrap();
        prop_assert_eq!(read_fields.to_bytes(), fields.to_bytes());
        prop_assert_eq!((&again.bytes, &again.file_name), (&recording.bytes, &recording.file_name));
        // Every beginning of it is no form, but for the last line end.
        for end in 0..written.len() - 2 {
            prop_assert!(read(&written.slice(..end), &for_engine, boundary("e")).is_err(), "{}", end);
        }
    }

    #[test]
    fn random_bytes_are_read_or_refused(
        pieces in prop::collection::vec(prop_oneof![
            tricky(),
            Just("--b\r\n".to_owned()),
            Just("\r\n--b--\r\n".to_owned()),
            Just("\r\n\r\n".to_owned()),
            Just(format!("{RECORDING}\r\n\r\n")),
            Just(format!("{}\r\n\r\n", text("model"))),
        ], 0..8),
        bytes in prop::collection::vec(any::<u8>(), 0..20),
    ) {
        let _ = read_form(&[pieces.concat().as_bytes(), &bytes].concat());
    }
}
