//! The upper bounds of histograms.

/// Times that clients notice, in seconds: 1 ms to 2 minutes.
pub(crate) const SECONDS: [f64; 25] = [
    0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 1.5, 2.0,
    3.0, 5.0, 7.5, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0,
];
/// Times between tokens, in seconds: steps of 1 ms up to 10 ms and of 5 ms up to 50 ms, then up to
/// 10 s.
pub(crate) const TOKEN_SECONDS: [f64; 28] = [
    0.001, 0.002, 0.003, 0.004, 0.005, 0.006, 0.007, 0.008, 0.009, 0.01, 0.012, 0.015, 0.02, 0.025,
    0.03, 0.035, 0.04, 0.045, 0.05, 0.06, 0.075, 0.1, 0.15, 0.25, 0.5, 1.0, 2.5, 10.0,
];
/// Work inside the router, in seconds: 1 us to 1 s.
pub(crate) const FINE_SECONDS: [f64; 15] = [
    0.000_001, 0.000_005, 0.000_01, 0.000_025, 0.000_05, 0.000_1, 0.000_25, 0.000_5, 0.001, 0.0025,
    0.005, 0.01, 0.05, 0.1, 1.0,
];
/// Times on one worker, in seconds. They are few, because there are as many series as workers.
pub(crate) const WORKER_SECONDS: [f64; 14] =
    [0.005, 0.01, 0.025, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 20.0, 60.0, 120.0];
/// Counts of blocks.
pub(crate) const BLOCKS: [f64; 14] =
    [0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0, 256.0, 512.0, 1024.0, 4096.0, 16384.0];
/// Counts of tokens: powers of two, and 0.
pub(crate) const TOKENS: [f64; 18] = [
    0.0,
    1.0,
    8.0,
    32.0,
    64.0,
    128.0,
    256.0,
    512.0,
    1024.0,
    2048.0,
    4096.0,
    8192.0,
    16384.0,
    32768.0,
    65536.0,
    131_072.0,
    262_144.0,
    1_048_576.0,
];
/// Relative errors; 1 is an error as large as the measured value.
pub(crate) const RATIOS: [f64; 12] =
    [0.01, 0.025, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0, 2.0, 5.0, 10.0];
