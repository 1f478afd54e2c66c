//! What happened.

use std::io::{self, Write};

/// What happened to one request. Times are nanoseconds from the first arrival.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Row {
    /// When it came.
    pub arrival_ns: u64,
    /// The prefill worker; `None` if it was prefilled locally or refused.
    pub prefill_worker: Option<u32>,
    /// Leading blocks that needed no computing.
    pub hit_blocks: u32,
    /// Leading blocks that were asked of a peer, whether or not they were still missing.
    pub fetch_blocks: u32,
    /// When that fetch was done.
    pub fetch_ready_ns: u64,
    /// When it was sent to a worker.
    pub placed_ns: u64,
    /// The most leading blocks that any worker held then.
    pub held_blocks: u32,
    /// Those that its own worker held then.
    pub chosen_blocks: u32,
    /// When its prefill began.
    pub prefill_start_ns: u64,
    /// When its prefill was done.
    pub prefill_end_ns: u64,
    /// The decode worker; `None` if it was refused.
    pub decode_worker: Option<u32>,
    /// Tokens whose KV was moved to the decode worker.
    pub moved_tokens: u32,
    /// When the prompt's KV was complete at the decode worker.
    pub kv_ready_ns: u64,
    /// When it had its first token.
    pub first_token_ns: u64,
    /// When it had its last token.
    pub last_token_ns: u64,
    /// Its first step's place in the decode worker's log.
    pub first_step: u32,
    /// Whether it was refused.
    pub rejected: bool,
}

impl Row {
    /// From arrival to first token, in nanoseconds.
    pub fn ttft_ns(&self) -> u64 {
        self.first_token_ns - self.arrival_ns
    }
}

/// What happened to all of them.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Outcome {
    /// In trace order.
    pub rows: Vec<Row>,
    /// Each prefill worker's busy time.
    pub prefill_busy_ns: Vec<u64>,
    /// Each decode worker's steps, by duration in nanoseconds.
    pub steps_ns: Vec<Vec<u64>>,
}

impl Outcome {
    /// Mean of the longest tenth of a request's intervals between tokens, rounded down; 0 if
    /// it has none. `scratch` is room to work in.
    pub fn tbt_ns(&self, request: usize, output_tokens: u32, scratch: &mut Vec<u64>) -> u64 {
        let row = &self.rows[request];
        let intervals = output_tokens as usize - 1;
        let Some(worker) = row.decode_worker.filter(|_| intervals > 0) else { return 0 };
        let first = row.first_step as usize + 1;
        let longest = intervals.div_ceil(10);
        scratch.clear();
        scratch.extend_from_slice(&self.steps_ns[worker as usize][first..first + intervals]);
        let (_, _, top) = scratch.select_nth_unstable(intervals - longest);
        // The element at the split belongs to the longest as well.
        let sum: u64 = top.iter().sum::<u64>() + scratch[intervals - longest];
        sum / longest as u64
    }

    /// Writes one tab-separated line per request, under a header, for comparison with another
    /// implementation. What does not apply is -1 for a worker and 0 else.
    pub fn dump(&self, out: &mut impl Write) -> io::Result<()> {
        writeln!(
            out,
            "req\tarrival_ns\tprefill_worker\thit_blocks\tprefill_start_ns\tprefill_end_ns\t\
             decode_worker\ttokens_moved\tkv_ready_ns\tfirst_token_ns\tlast_token_ns\trejected"
        )?;
        let worker = |worker: Option<u32>| worker.map_or(-1, i64::from);
        for (request, row) in self.rows.iter().enumerate() {
            writeln!(
                out,
                "{request}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}\t{}",
                row.arrival_ns,
                worker(row.prefill_worker),
                row.hit_blocks,
                row.prefill_start_ns,
                row.prefill_end_ns,
                worker(row.decode_worker),
                row.moved_tokens,
                row.kv_ready_ns,
                row.first_token_ns,
                row.last_token_ns,
                u8::from(row.rejected),
            )?;
        }
        Ok(())
    }
}
