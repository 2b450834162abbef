//! Which session is in which slot, and what every slot's cache holds.
//!
//! A **bank** is the caches that one call gets: all slots of the graph. Sessions of one bank share
//! calls, so a new session goes where most sessions are. A slot keeps its rows when its session
//! ends: a later one with the same beginning goes on behind it.

use std::cmp::Reverse;
use std::collections::HashMap;

use crate::backend::{SessionKey, common_len};

/// A slot of a bank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) bank: usize,
    pub(super) slot: usize,
}

/// Rows of another slot that a session begins with.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Copied {
    pub(super) from: Place,
    pub(super) to: Place,
    pub(super) n_rows: usize,
}

/// All banks; `C` is the caches of one.
#[derive(Debug)]
pub(super) struct Banks<C> {
    /// A bank that went away leaves one without slots, so that places stay.
    banks: Vec<Bank<C>>,
    sessions: HashMap<SessionKey, Place>,
    n_slots: usize,
}

#[derive(Debug, Default)]
struct Bank<C> {
    caches: C,
    slots: Vec<Slot>,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    is_taken: bool,
    /// Token of every row in the cache.
    tokens: Vec<u32>,
}

impl<C> Bank<C> {
    fn n_taken(&self) -> usize {
        self.slots.iter().filter(|slot| slot.is_taken).count()
    }

    fn is_gap(&self) -> bool {
        self.slots.is_empty()
    }

    fn is_idle(&self) -> bool {
        !self.is_gap() && self.n_taken() == 0
    }
}

impl<C: Default> Banks<C> {
    /// One bank without sessions.
    pub(super) fn new(n_slots: usize, caches: C) -> Self {
        let mut banks = Self { banks: Vec::new(), sessions: HashMap::new(), n_slots };
        banks.add(caches);
        banks
    }

    /// Puts a new session into a slot. Returns the rows of `prompt` that its cache holds (fewer
    /// than all of them), or will hold once the rows to copy are there.
    ///
    /// # Errors
    /// Those of `make`, which makes the caches of another bank; nothing is opened then.
    pub(super) fn open<E>(
        &mut self,
        session: SessionKey,
        prompt: &[u32],
        make: impl FnOnce() -> Result<C, E>,
    ) -> Result<(usize, Option<Copied>), E> {
        let bank = match self.fullest_with_room() {
            Some(bank) => bank,
            None => self.add(make()?),
        };
        let (n_cached, from) = self.longest_prefix(prompt);
        let slot = match from {
            Some(from) if from.bank == bank && !self.slot(from).is_taken => from.slot,
            _ => self.least_useful(bank),
        };
        let to = Place { bank, slot };
        self.sessions.insert(session, to);
        *self.slot_mut(to) = Slot { is_taken: true, tokens: prompt[..n_cached].to_vec() };
        let copied = from.filter(|from| *from != to);
        Ok((n_cached, copied.map(|from| Copied { from, to, n_rows: n_cached })))
    }

    /// Ends a session; its rows stay in their slot. Of several banks without sessions one is kept.
    pub(super) fn close(&mut self, session: SessionKey) {
        let Some(place) = self.sessions.remove(&session) else { return };
        self.slot_mut(place).is_taken = false;
        let n_idle = self.banks.iter().filter(|bank| bank.is_idle()).count();
        let bank = &mut self.banks[place.bank];
        if bank.is_idle() && n_idle > 1 {
            *bank = Bank::default();
        }
    }

    /// Ends a session whose cache may be half written.
    pub(super) fn discard(&mut self, session: SessionKey) {
        self.truncate(session, 0);
        self.close(session);
    }

    /// Where a session is.
    pub(super) fn place(&self, session: SessionKey) -> Option<Place> {
        self.sessions.get(&session).copied()
    }

    /// Token of every row of a session.
    pub(super) fn tokens(&self, session: SessionKey) -> Option<&[u32]> {
        Some(&self.slot(self.place(session)?).tokens)
    }

    /// Takes back all rows of a session from `len` on.
    pub(super) fn truncate(&mut self, session: SessionKey, len: usize) {
        if let Some(place) = self.place(session) {
            self.slot_mut(place).tokens.truncate(len);
        }
    }

    /// Notes rows behind those of a session.
    pub(super) fn append(&mut self, session: SessionKey, tokens: &[u32]) {
        if let Some(place) = self.place(session) {
            self.slot_mut(place).tokens.extend_from_slice(tokens);
        }
    }

    /// The caches of a bank that has a session.
    pub(super) fn caches(&mut self, bank: usize) -> &mut C {
        &mut self.banks[bank].caches
    }

    /// Open sessions.
    pub(super) fn n_sessions(&self) -> usize {
        self.sessions.len()
    }

    /// Banks that have caches.
    pub(super) fn n_banks(&self) -> usize {
        self.banks.iter().filter(|bank| !bank.is_gap()).count()
    }

    /// Banks that have sessions.
    pub(super) fn n_used(&self) -> usize {
        self.banks.iter().filter(|bank| bank.n_taken() > 0).count()
    }

    /// Rows of all open sessions.
    pub(super) fn n_rows(&self) -> usize {
        let slots = self.banks.iter().flat_map(|bank| &bank.slots);
        slots.filter(|slot| slot.is_taken).map(|slot| slot.tokens.len()).sum()
    }

    fn add(&mut self, caches: C) -> usize {
        let bank = Bank { caches, slots: vec![Slot::default(); self.n_slots] };
        if let Some(gap) = self.banks.iter().position(Bank::is_gap) {
            self.banks[gap] = bank;
            return gap;
        }
        self.banks.push(bank);
        self.banks.len() - 1
    }

    /// The bank with most sessions that has a slot for another one.
    fn fullest_with_room(&self) -> Option<usize> {
        let banks = self.banks.iter().enumerate();
        let with_room = banks.filter(|(_, bank)| bank.n_taken() < bank.slots.len());
        with_room.max_by_key(|(index, bank)| (bank.n_taken(), Reverse(*index))).map(|(at, _)| at)
    }

    /// The slot that begins with most rows of a prompt, and how many.
    fn longest_prefix(&self, prompt: &[u32]) -> (usize, Option<Place>) {
        // The last row must run to yield a token.
        let prompt = &prompt[..prompt.len().saturating_sub(1)];
        let (mut longest, mut found) = (0, None);
        for (bank, holds) in self.banks.iter().enumerate() {
            for (slot, held) in holds.slots.iter().enumerate() {
                let len = common_len(&held.tokens, prompt);
                if len > longest {
                    (longest, found) = (len, Some(Place { bank, slot }));
                }
            }
        }
        (longest, found)
    }

    /// The slot of a bank that nobody has, with the fewest rows.
    fn least_useful(&self, bank: usize) -> usize {
        let slots = self.banks[bank].slots.iter().enumerate();
        let free = slots.filter(|(_, slot)| !slot.is_taken);
        free.min_by_key(|(_, slot)| slot.tokens.len()).map_or(0, |(index, _)| index)
    }

    fn slot(&self, place: Place) -> &Slot {
        &self.banks[place.bank].slots[place.slot]
    }

    fn slot_mut(&mut self, place: Place) -> &mut Slot {
        &mut self.banks[place.bank].slots[place.slot]
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use super::*;

    /// Banks of two slots whose caches are numbers in the order in which they were made.
    struct Hall {
        banks: Banks<usize>,
        n_made: usize,
    }

    impl Hall {
        fn new() -> Self {
            Self { banks: Banks::new(2, 0), n_made: 1 }
        }

        fn open(&mut self, key: u64, prompt: &[u32]) -> (usize, Option<Copied>) {
            let make = || {
                self.n_made += 1;
                Ok::<_, Infallible>(self.n_made - 1)
            };
            self.banks.open(SessionKey(key), prompt, make).unwrap()
        }

        fn place(&self, key: u64) -> (usize, usize) {
            let place = self.banks.place(SessionKey(key)).unwrap();
            (place.bank, place.slot)
        }
    }

    #[test]
    fn sessions_gather_in_few_banks() {
        let mut hall = Hall::new();
        for key in 1..=4 {
            assert_eq!(hall.open(key, &[]), (0, None));
        }
        let places = [1, 2, 3, 4].map(|key| hall.place(key));
        assert_eq!(places, [(0, 0), (0, 1), (1, 0), (1, 1)]);
        hall.banks.close(SessionKey(1));
        hall.banks.close(SessionKey(3));
        hall.banks.close(SessionKey(4));
        assert_eq!((hall.banks.n_banks(), hall.banks.n_sessions()), (2, 1));
        hall.open(5, &[]);
        assert_eq!(hall.place(5).0, 0, "beside session 2, not alone");
        hall.banks.close(SessionKey(2));
        hall.banks.close(SessionKey(5));
        assert_eq!((hall.banks.n_banks(), hall.banks.n_sessions()), (1, 0));
        assert_eq!(hall.banks.n_used(), 0);
        for key in 6..=8 {
            hall.open(key, &[]);
        }
        assert_eq!(hall.n_made, 3, "the bank in the gap was made anew");
        assert_eq!((hall.banks.n_banks(), hall.banks.n_used()), (2, 2));
    }

    #[test]
    fn a_session_begins_with_the_longest_prefix_that_a_slot_holds() {
        let mut hall = Hall::new();
        hall.open(1, &[]);
        hall.banks.append(SessionKey(1), &[1, 2, 3, 4]);
        // Beside its original.
        let (n_cached, copied) = hall.open(2, &[1, 2, 3, 9, 9]);
        let (from, to) = (Place { bank: 0, slot: 0 }, Place { bank: 0, slot: 1 });
        assert_eq!((n_cached, copied), (3, Some(Copied { from, to, n_rows: 3 })));
        assert_eq!(hall.banks.tokens(SessionKey(2)), Some(&[1, 2, 3][..]));
        // In its place, after its end; the last row always runs.
        hall.banks.close(SessionKey(1));
        assert_eq!(hall.open(3, &[1, 2, 3, 4]), (3, None));
        assert_eq!(hall.place(3), (0, 0));
        // From another bank.
        let (n_cached, copied) = hall.open(4, &[1, 2, 7]);
        assert_eq!((n_cached, hall.place(4)), (2, (1, 0)));
        assert_eq!(copied.map(|copied| copied.from.bank), Some(0));
        assert_eq!(hall.banks.n_rows(), 3 + 3 + 2);
    }

    #[test]
    fn what_may_be_half_written_is_no_prefix() {
        let mut hall = Hall::new();
        hall.open(1, &[]);
        hall.banks.append(SessionKey(1), &[1, 2, 3]);
        hall.banks.truncate(SessionKey(1), 2);
        assert_eq!(hall.banks.tokens(SessionKey(1)), Some(&[1, 2][..]));
        hall.banks.discard(SessionKey(1));
        assert_eq!(hall.banks.tokens(SessionKey(1)), None);
        assert_eq!(hall.open(2, &[1, 2, 3]), (0, None));
    }

    #[test]
    fn a_bank_that_cannot_be_made_opens_nothing() {
        let mut banks = Banks::new(1, ());
        banks.open(SessionKey(1), &[], || Ok::<(), &str>(())).unwrap();
        let refused = banks.open(SessionKey(2), &[], || Err("no memory"));
        assert_eq!(refused, Err("no memory"));
        assert_eq!((banks.n_sessions(), banks.n_banks()), (1, 1));
    }
}
