//! Random requests, leavings and faults: what a tenant is admitted, and what the ledger has of it, is
//! what engines have generated and computed for the attempts that answered.

use std::collections::HashMap;
use std::sync::Mutex;

use futures_util::future::join_all;
use rand::rngs::StdRng;
use rand::{RngExt, SeedableRng};

use super::*;

/// Requests at a time, and how often so many.
const AT_ONCE: usize = 8;
const ROUNDS: usize = 6;

/// What an engine does with a request, and what its client does.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Course {
    /// The engine generates everything and reports its usage.
    Completes,
    /// The same, after another engine has failed.
    CompletesAfterFailure,
    /// The client leaves when it has the tokens so far.
    IsLeft,
    /// The same, after another engine has failed.
    IsLeftAfterFailure,
    /// The client leaves before the engine begins.
    IsLeftBefore,
    /// The engine breaks off.
    BreaksOff,
    /// The engine gives the usage so far with each event, and the client leaves.
    IsLeftWithTotals,
}

const COURSES: [Course; 7] = [
    Course::Completes,
    Course::CompletesAfterFailure,
    Course::IsLeft,
    Course::IsLeftAfterFailure,
    Course::IsLeftBefore,
    Course::BreaksOff,
    Course::IsLeftWithTotals,
];

/// A request of the plan: its path, its course, and the lengths of the texts of its events. The
/// tokenizer has a token for each byte.
#[derive(Clone, Debug)]
struct Planned {
    path: &'static str,
    course: Course,
    texts: Vec<usize>,
}

impl Planned {
    fn random(random: &mut StdRng) -> Self {
        let course = COURSES[random.random_range(0..COURSES.len())];
        let path = match course {
            // Only chunks have running totals.
            Course::IsLeftWithTotals => [CHAT, COMPLETIONS][random.random_range(0..2)],
            _ => [CHAT, COMPLETIONS, GENERATE, RESPONSES, MESSAGES][random.random_range(0..5)],
        };
        let count = random.random_range(1..6);
        Self { path, course, texts: (0..count).map(|_| random.random_range(1..9)).collect() }
    }

    fn tokens(&self) -> u64 {
        self.texts.iter().sum::<usize>() as u64
    }

    fn fails_first(&self) -> bool {
        matches!(self.course, Course::CompletesAfterFailure | Course::IsLeftAfterFailure)
    }

    /// The tokens that the tenant pays for the reply; `None` if the request is free. A prompt that a
    /// prefill engine has computed is not, although no reply has begun.
    fn charged(&self, prefill: bool) -> Option<u64> {
        match self.course {
            Course::IsLeftBefore => prefill.then_some(0),
            Course::BreaksOff => None,
            _ => Some(self.tokens()),
        }
    }

    fn outcome(&self) -> &'static str {
        match self.course {
            Course::Completes | Course::CompletesAfterFailure => "ok",
            Course::BreaksOff => "decode_lost",
            _ => "cancelled",
        }
    }

    fn output(&self, bytes: usize, so_far: u64, prompt_tokens: u64) -> Value {
        let text = "z".repeat(bytes);
        let mut event = match self.path {
            CHAT => {
                chunk(&json!([{"index": 0, "delta": {"content": text}, "finish_reason": null}]))
            }
            COMPLETIONS => chunk(&json!([{"index": 0, "text": text, "finish_reason": null}])),
            GENERATE => chunk(&json!([{"index": 0, "token_ids": vec![125; bytes]}])),
            RESPONSES => json!({"type": "response.output_text.delta", "delta": text}),
            _ => json!({
                "type": "content_block_delta", "index": 0,
                "delta": {"type": "text_delta", "text": text},
            }),
        };
        if self.course == Course::IsLeftWithTotals {
            event["usage"] = usage(prompt_tokens, so_far);
        }
        event
    }

    /// The events of the reply, of which the last ones say that it is complete if it is.
    fn events(&self, prompt_tokens: u64) -> String {
        let mut all: Vec<Value> = opening(self.path);
        let mut so_far = 0;
        for bytes in &self.texts {
            so_far += *bytes as u64;
            all.push(self.output(*bytes, so_far, prompt_tokens));
        }
        let mut body: String = all.iter().map(event).collect();
        if self.outcome() == "ok" {
            body += &ending(self.path, prompt_tokens, self.tokens());
        }
        body
    }
}

fn usage(prompt: u64, completion: u64) -> Value {
    json!({
        "prompt_tokens": prompt, "completion_tokens": completion,
        "total_tokens": prompt + completion,
    })
}

/// The events with which a reply begins before any output.
fn opening(path: &str) -> Vec<Value> {
    let whole = events(path).0;
    let data = whole.lines().filter_map(|line| line.strip_prefix("data: "));
    let data = data.map(|data| serde_json::from_str(data).unwrap());
    data.take_while(|event: &Value| !event.to_string().contains(MARK)).collect()
}

/// The events with which a reply ends, with its usage.
fn ending(path: &str, prompt: u64, completion: u64) -> String {
    let in_out = json!({"input_tokens": prompt, "output_tokens": completion});
    let last = match path {
        RESPONSES => vec![json!({
            "type": "response.completed",
            "response": {"id": "x", "status": "completed", "usage": in_out},
        })],
        MESSAGES => vec![
            json!({"type": "content_block_stop", "index": 0}),
            json!({"type": "message_delta", "delta": {"stop_reason": "end_turn"}, "usage": in_out}),
            json!({"type": "message_stop"}),
        ],
        _ => {
            vec![chunk(&json!([{"index": 0, "delta": {}, "text": "", "finish_reason": "stop"}])), {
                let mut event = chunk(&json!([]));
                event["usage"] = usage(prompt, completion);
                event
            }]
        }
    };
    let done = if matches!(path, RESPONSES | MESSAGES) { "" } else { "data: [DONE]\n\n" };
    last.iter().map(event).collect::<String>() + done
}

/// The number that the text of a request's prompt has, which a system prompt repeats in part, or that
/// of its first token ids.
fn number(body: &Value) -> usize {
    let text = body.to_string();
    let digits = |rest: &str| rest.chars().take_while(char::is_ascii_digit).collect::<String>();
    let numbers = text.split("number-").skip(1).map(digits);
    let largest = numbers.map(|digits| digits.parse().unwrap()).max();
    largest.unwrap_or_else(|| body["token_ids"][0].as_u64().unwrap() as usize)
}

/// The request of this number.
fn body(planned: &Planned, number: usize) -> Value {
    let text = format!("number-{number} {}", prompt(5, "random"));
    let mut body = match planned.path {
        CHAT => chat(&text),
        COMPLETIONS => completion(&text),
        GENERATE => generate(&[&[number as u32][..], &token_ids(40, 1)].concat()),
        path => dialect::request(path, &text, 100),
    };
    match planned.path {
        GENERATE => body["sampling_params"]["max_tokens"] = 100.into(),
        RESPONSES => {}
        _ => body["max_tokens"] = 100.into(),
    }
    body
}

type Plan = Arc<Mutex<HashMap<usize, Planned>>>;

/// The engines' part of the plan.
fn script(plan: &Plan, asked: &Arc<Mutex<HashMap<usize, usize>>>) -> RequestScript {
    let (plan, asked) = (Arc::clone(plan), Arc::clone(asked));
    Arc::new(move |heard| {
        let body: Value = serde_json::from_slice(&heard.body).unwrap();
        let number = number(&body);
        let planned = plan.lock().unwrap()[&number].clone();
        let attempt = {
            let mut asked = asked.lock().unwrap();
            let attempts = asked.entry(number).or_default();
            *attempts += 1;
            *attempts
        };
        if planned.fails_first() && attempt == 1 {
            return ScriptedReply::events("data: {\"error\":{\"message\":\"x\",\"code\":500}}\n\n");
        }
        // Any figure up to the router's own will do.
        let events = planned.events(7);
        match planned.course {
            Course::IsLeftBefore => silent_after(b""),
            Course::Completes | Course::CompletesAfterFailure | Course::BreaksOff => {
                ScriptedReply::events(&events)
            }
            _ => silent_after(&[STREAM_HEAD, events.as_bytes()].concat()),
        }
    })
}

impl Stand {
    /// Sends a request of the plan and takes what is to be read of its reply. Returns the status.
    async fn play(
        &self,
        planned: &Planned,
        number: usize,
        asked: &Mutex<HashMap<usize, usize>>,
    ) -> u16 {
        let body = body(planned, number);
        if planned.course == Course::IsLeftBefore {
            let is_asked = || asked.lock().unwrap().contains_key(&number);
            tokio::select! {
                status = self.read(planned, &body) => return status,
                () = eventually("an engine is asked", async || is_asked()) => return 0,
            }
        }
        self.read(planned, &body).await
    }

    /// The status of the reply, once all of its output has come.
    async fn read(&self, planned: &Planned, body: &Value) -> u16 {
        let address = self.cluster.running.addresses.http;
        let client = Hyper::builder(TokioExecutor::new()).build_http::<Full<Bytes>>();
        let request = Request::post(format!("http://{address}{}", planned.path))
            .header("authorization", bearer(&self.key))
            .header("content-type", "application/json")
            .body(Full::from(streamed(body).to_string()))
            .unwrap();
        let response = client.request(request).await.unwrap();
        let status = response.status().as_u16();
        let (mut body, mut seen) = (response.into_body(), String::new());
        let waits_for_end =
            planned.outcome() != "cancelled" || planned.course == Course::IsLeftBefore;
        let has_all = |seen: &str| match planned.path {
            GENERATE => seen.matches("125").count() as u64 >= planned.tokens(),
            _ => seen.matches('z').count() as u64 >= planned.tokens(),
        };
        while status == 200 && (waits_for_end || !has_all(&seen)) {
            let Some(Ok(frame)) = body.frame().await else { break };
            seen.push_str(&String::from_utf8_lossy(frame.data_ref().unwrap()));
        }
        status
    }
}

#[tokio::test]
async fn random_requests_leavings_and_faults_are_accounted_for_to_the_token() {
    run(false).await;
}

#[tokio::test]
async fn the_same_with_prompts_that_a_prefill_engine_computes() {
    run(true).await;
}

/// Plays random requests on three engines, whose prompts another engine computes with `prefill`.
async fn run(prefill: bool) {
    let mut random = StdRng::seed_from_u64(0x5eed);
    let plan = Plan::default();
    let asked: Arc<Mutex<HashMap<usize, usize>>> = Arc::default();
    let model = "breaker: { failures: 0 }
retries: { decode: 2, budget_percent: 1000 }
health: { ejection: { failure_percent: 0 } }";
    let stand = Stand::serving(prefill, 3, script(&plan, &asked), model).await;
    let path = stand.cluster.files.path().join("ledger.jsonl");
    let (mut numbers, mut refused, mut spent) = (0..1000, 0, 0);
    for round in 0..ROUNDS {
        let numbers: Vec<usize> = numbers.by_ref().take(AT_ONCE).collect();
        for number in &numbers {
            plan.lock().unwrap().insert(*number, Planned::random(&mut random));
        }
        let planned = |number: &usize| plan.lock().unwrap()[number].clone();
        let plays = numbers.iter().map(async |number| {
            let planned = planned(number);
            (planned.clone(), stand.play(&planned, *number, &asked).await)
        });
        let played = join_all(plays).await;
        let admitted: Vec<_> = played.iter().filter(|(_, status)| *status != 429).collect();
        refused += played.len() - admitted.len();
        let lines = (round + 1) * AT_ONCE - refused;
        eventually("the lines are written", async || {
            let text = std::fs::read_to_string(&path).unwrap_or_default();
            text.ends_with('\n') && text.lines().count() >= lines
        })
        .await;
        let written = ledger_lines(&path);
        let written = &written[lines - admitted.len()..];
        // Each course has its outcome and its tokens, and nobody else's.
        let mut expected: Vec<_> = admitted
            .iter()
            .map(|(planned, _)| (planned.outcome().to_owned(), planned.charged(prefill)))
            .collect();
        let mut found: Vec<_> = written
            .iter()
            .map(|line| {
                let outcome = line["outcome"].as_str().unwrap().to_owned();
                (outcome, line["completion_tokens"].as_u64())
            })
            .collect();
        expected.sort();
        found.sort();
        assert_eq!(found, expected, "{played:?} {written:?}");
        for line in written {
            let [prompt, cached, completion] =
                ["prompt_tokens", "cached_tokens", "completion_tokens"]
                    .map(|name| line[name].as_u64());
            assert_eq!(prompt.is_some(), completion.is_some(), "{line}");
            // What the prefill engine had cached costs nothing.
            let computed = prompt.unwrap_or(0) - cached.unwrap_or(0);
            spent += computed + completion.unwrap_or(0);
        }
        assert!(spent <= LIMIT, "{spent}");
        assert_eq!(stand.remaining().await, LIMIT - spent, "what is admitted is what was used");
    }
    let counted = stand.cluster.metric("splitrail_tenant_settled_tokens_total", &[]).await;
    assert_eq!(counted as u64, spent);
}
