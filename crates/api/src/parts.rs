//! A body in parts, where the long parts are shared buffers.
//!
//! An engine receives the client's text with a few members replaced. The prompt is not copied for
//! this: each leg and each attempt refers to the client's buffer.

use std::collections::VecDeque;
use std::io::IoSlice;

use bytes::{Buf, Bytes};

/// A body, starting at its first unsent byte. Cheap to clone.
#[derive(Clone, Debug, Default)]
pub struct Parts {
    /// Empty only if all has been sent.
    first: Bytes,
    rest: VecDeque<Bytes>,
}

impl Parts {
    /// Appends a part. Empty parts are dropped.
    pub(super) fn push(&mut self, part: Bytes) {
        if self.first.is_empty() {
            self.first = part;
        } else if !part.is_empty() {
            self.rest.push_back(part);
        }
    }

    /// Fills `out` with slices of the bytes after `skip`. Returns the number of slices.
    pub fn slices_from<'a>(&'a self, mut skip: usize, out: &mut [IoSlice<'a>]) -> usize {
        let mut count = 0;
        for part in std::iter::once(&self.first).chain(&self.rest) {
            if skip >= part.len() {
                skip -= part.len();
                continue;
            }
            let Some(slice) = out.get_mut(count) else { break };
            *slice = IoSlice::new(&part[std::mem::take(&mut skip)..]);
            count += 1;
        }
        count
    }

    /// The whole body as one buffer; copied if it has several parts.
    pub fn into_bytes(mut self) -> Bytes {
        match self.rest.is_empty() {
            true => self.first,
            false => self.copy_to_bytes(self.remaining()),
        }
    }
}

impl From<Bytes> for Parts {
    fn from(first: Bytes) -> Self {
        Self { first, rest: VecDeque::new() }
    }
}

impl Buf for Parts {
    fn remaining(&self) -> usize {
        self.first.len() + self.rest.iter().map(Bytes::len).sum::<usize>()
    }

    fn chunk(&self) -> &[u8] {
        &self.first
    }

    fn advance(&mut self, mut bytes: usize) {
        while bytes >= self.first.len() && !self.first.is_empty() {
            bytes -= self.first.len();
            self.first = self.rest.pop_front().unwrap_or_default();
        }
        self.first.advance(bytes);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn parts_read_as_one_however_they_are_read(
            parts in prop::collection::vec(prop::collection::vec(any::<u8>(), 0..5), 0..6),
            steps in prop::collection::vec(0usize..7, 0..30),
        ) {
            let whole = parts.concat();
            let mut body = Parts::default();
            parts.into_iter().for_each(|part| body.push(part.into()));
            prop_assert_eq!(&body.clone().into_bytes(), &whole);
            let (whole_body, mut rest) = (body.clone(), &whole[..]);
            for step in steps {
                prop_assert_eq!(body.remaining(), rest.len());
                prop_assert!(rest.starts_with(body.chunk()));
                prop_assert_eq!(body.chunk().is_empty(), rest.is_empty());
                let mut slices = [IoSlice::new(&[]); 2];
                let count = whole_body.slices_from(whole.len() - rest.len(), &mut slices);
                let seen = slices[..count].iter().flat_map(|slice| slice.to_vec()).collect::<Vec<_>>();
                prop_assert!(rest.starts_with(&seen) && seen.is_empty() == rest.is_empty());
                prop_assert!(count == 2 || seen.len() == rest.len());
                let step = step.min(rest.len());
                body.advance(step);
                rest = &rest[step..];
            }
        }
    }
}
