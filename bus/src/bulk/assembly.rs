//! Messages from their parts.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use stagebus_schemas::codec::MAX_MESSAGE_BYTES;
use stagebus_schemas::messages::bulk::Part;

/// Messages that are put together at the same time; more are dropped, and found missing later.
const MAX_TRANSFERS: usize = 256;

/// Bytes of all of them.
const MAX_BYTES: usize = 512 << 20;

/// Time without a part after which a message is given up.
const PATIENCE: Duration = Duration::from_secs(60);

/// A message that is whole again.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct BulkDelivery {
    /// The message.
    pub payload: Bytes,
    /// Its reply subject.
    pub reply: Option<String>,
}

/// Messages of which parts are missing.
#[derive(Debug, Default)]
pub(super) struct Assembly {
    transfers: HashMap<u64, Begun>,
    n_bytes: usize,
}

#[derive(Debug)]
struct Begun {
    reply: Option<String>,
    data: BytesMut,
    next_index: u32,
    n_parts: u32,
    last_part: Instant,
}

impl Assembly {
    /// Takes a part, and returns the message that it completes. A message with a hole is dropped.
    pub(super) fn add(&mut self, part: Part, now: Instant) -> Option<BulkDelivery> {
        if part.n_parts == 1 {
            self.forget(part.transfer);
            return Some(BulkDelivery { payload: part.data, reply: part.reply });
        }
        if part.index == 0 {
            self.forget(part.transfer);
            self.forget_old(now);
            if self.transfers.len() >= MAX_TRANSFERS {
                return None;
            }
            let begun = Begun {
                reply: part.reply.clone(),
                data: BytesMut::new(),
                next_index: 0,
                n_parts: part.n_parts,
                last_part: now,
            };
            self.transfers.insert(part.transfer, begun);
        }
        let begun = self.transfers.get_mut(&part.transfer)?;
        let fits = begun.data.len() + part.data.len() <= MAX_MESSAGE_BYTES
            && self.n_bytes + part.data.len() <= MAX_BYTES;
        if (part.index, part.n_parts) != (begun.next_index, begun.n_parts) || !fits {
            self.forget(part.transfer);
            return None;
        }
        begun.data.extend_from_slice(&part.data);
        begun.next_index += 1;
        begun.last_part = now;
        self.n_bytes += part.data.len();
        if begun.next_index < begun.n_parts {
            return None;
        }
        let begun = self.forget(part.transfer)?;
        Some(BulkDelivery { payload: begun.data.freeze(), reply: begun.reply })
    }

    fn forget(&mut self, transfer: u64) -> Option<Begun> {
        let begun = self.transfers.remove(&transfer)?;
        self.n_bytes -= begun.data.len();
        Some(begun)
    }

    fn forget_old(&mut self, now: Instant) {
        let is_old = |begun: &Begun| now.saturating_duration_since(begun.last_part) >= PATIENCE;
        let old: Vec<u64> = self
            .transfers
            .iter()
            .filter(|(_, begun)| is_old(begun))
            .map(|(transfer, _)| *transfer)
            .collect();
        for transfer in old {
            self.forget(transfer);
        }
    }
}

#[cfg(test)]
mod tests {
    use stagebus_schemas::version::MessageVersion;

    use super::*;

    fn part(transfer: u64, index: u32, n_parts: u32, data: &[u8]) -> Part {
        Part {
            version: MessageVersion::CURRENT,
            transfer,
            index,
            n_parts,
            reply: (index == 0).then(|| "r".to_owned()),
            data: Bytes::copy_from_slice(data),
        }
    }

    fn whole(bytes: &[u8]) -> Option<BulkDelivery> {
        let payload = Bytes::copy_from_slice(bytes);
        Some(BulkDelivery { payload, reply: Some("r".to_owned()) })
    }

    #[test]
    fn parts_of_several_messages_may_alternate() {
        let (mut assembly, now) = (Assembly::default(), Instant::now());
        assert_eq!(assembly.add(part(1, 0, 2, b"ab"), now), None);
        assert_eq!(assembly.add(part(2, 0, 2, b"cd"), now), None);
        assert_eq!(assembly.add(part(3, 0, 1, b"x"), now), whole(b"x"));
        assert_eq!(assembly.add(part(1, 1, 2, b"e"), now), whole(b"abe"));
        assert_eq!(assembly.add(part(2, 1, 2, b"f"), now), whole(b"cdf"));
        assert!(assembly.transfers.is_empty() && assembly.n_bytes == 0);
    }

    #[test]
    fn a_message_with_a_hole_never_becomes_whole() {
        let (mut assembly, now) = (Assembly::default(), Instant::now());
        assert_eq!(assembly.add(part(1, 0, 3, b"a"), now), None);
        assert_eq!(assembly.add(part(1, 2, 3, b"c"), now), None);
        assert_eq!(assembly.add(part(1, 1, 3, b"b"), now), None);
        assert_eq!(assembly.add(part(1, 2, 3, b"c"), now), None);
        assert_eq!(assembly.add(part(2, 1, 2, b"b"), now), None, "without its beginning");
        assert!(assembly.transfers.is_empty() && assembly.n_bytes == 0);
    }

    #[test]
    fn what_never_ends_is_forgotten() {
        let (mut assembly, now) = (Assembly::default(), Instant::now());
        for transfer in 0..2 * MAX_TRANSFERS as u64 {
            assembly.add(part(transfer, 0, 2, b"a"), now);
        }
        assert_eq!(assembly.transfers.len(), MAX_TRANSFERS);
        let later = now + PATIENCE;
        assert_eq!(assembly.add(part(9999, 0, 2, b"a"), later), None);
        assert_eq!(assembly.add(part(9999, 1, 2, b"b"), later), whole(b"ab"));
        assert!(assembly.transfers.is_empty());
    }
}
