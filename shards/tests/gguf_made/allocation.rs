//! Measures the largest allocation of a thread.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

thread_local! {
    static LARGEST: Cell<usize> = const { Cell::new(0) };
}

struct Watching;

fn note(size: usize) {
    // A thread that is ending has no cell any more, and nobody asks for its result.
    LARGEST.try_with(|largest| largest.set(largest.get().max(size))).unwrap_or_default();
}

#[expect(unsafe_code, reason = "the only way to see what is allocated")]
// SAFETY: every call goes to the system's allocator unchanged.
unsafe impl GlobalAlloc for Watching {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        note(layout.size());
        // SAFETY: the caller keeps the contract of `alloc`.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        // SAFETY: the caller keeps the contract of `dealloc`.
        unsafe { System.dealloc(pointer, layout) }
    }

    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        note(new_size);
        // SAFETY: the caller keeps the contract of `realloc`.
        unsafe { System.realloc(pointer, layout, new_size) }
    }
}

#[global_allocator]
static ALLOCATOR: Watching = Watching;

/// The size in bytes of the largest allocation that `work` makes on this thread.
pub(crate) fn largest_during(work: impl FnOnce()) -> usize {
    LARGEST.set(0);
    work();
    LARGEST.get()
}

#[test]
fn an_allocation_is_seen() {
    assert_eq!(largest_during(|| drop(std::hint::black_box(vec![0u8; 12_345]))), 12_345);
}
