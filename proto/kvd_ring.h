/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The submission ring: shared memory in which an engine submits work to its daemon
 * without a system call, and the arena, which contains the lists as they are in memory.
 * `session.share` returns three descriptors: ring, arena, eventfd. Byte order of the
 * machine, little-endian.
 *
 * Ring = header (one 4096-byte page), then `entries` entries of 64 bytes. It has one
 * writer (the engine: kvd_ring_push() below is all that it needs) and one reader (the
 * daemon). `tail` counts submitted entries, `head` processed ones; neither wraps. Entry n
 * is at n % entries. The daemon processes entries in order, and each line of the
 * session's socket after the entries submitted before it. The arena bytes of an entry
 * belong to the daemon until head has passed the entry, then to the engine again.
 *
 * The daemon sleeps while the ring is empty. It has then set `asleep` to non-zero, and
 * the engine writes 1 to the eventfd after pushing. While the daemon is awake no signal
 * is needed.
 *
 * Results. The ring has no replies. An object created by an entry is in a slot of the
 * status page that the engine chose among its own (first_slot … + slot_count), with a
 * generation one higher than the slot's word shows, skipping 0. Until the daemon has
 * processed the entry, the word shows the previous generation; then it shows the state of
 * the new one, or KVD_FAILED with a code if the entry was refused. In commands on the
 * socket its number is KVD_RING_IDS + slot. The engine may reuse a slot when its word
 * shows KVD_FLAG_FREE. An entry that no correct engine sends (a slot in use or of the
 * daemon, a generation out of sequence, bytes outside the arena, an unknown op) ends the
 * session, because kvd and the engine disagree about the contents of memory.
 * `session.share` lists the ops that a daemon knows (`ops`).
 *
 * Rooms. OPEN, BIND, SEND, CLOSE and EXTEND are room.open, room.bind, room.send,
 * room.close and room.extend without a reply: if one is refused, the room fails with the
 * code in its slot. They name a room by slot and generation, also one opened by the
 * socket. Entries for a room that is closed or has another generation are ignored. Their
 * payload is `n1` views (struct kvd_ring_view), contiguous, then `n2` bytes of JSON text;
 * `bytes` is the size of both. CANCEL and RELEASE of a room's number (KVD_RING_IDS +
 * slot) are ABORT and CLOSE.
 *
 * Chunks, each op in a new slot. FIND counts the leading chunks that are present; any of
 * them may be evicted at any time. HOLD pins them against eviction until its lease ends,
 * or joins a hold: pins the same chunks for another session or rank. HOLD_REMOTE also
 * queries other daemons (those in chunk_peers, and those that the index nodes name) for
 * chunks missing here, and shows BOOTSTRAPPING until they have replied. PUT and FETCH are
 * chunk.put and chunk.fetch. The slot has the result of FIND, HOLD and HOLD_REMOTE:
 * `total` chunks, `bytes` tokens, `rows` trailing chunks that are on another daemon, and
 * for a joined hold `first_token`: the number of the first chunk. A successful FIND frees
 * its slot. RELEASE frees the slot of a refused one, and closes a hold or a move; CANCEL
 * aborts a move.
 *
 * ATTEND takes a new slot, too, which is free again with the terminal word. Its `bytes`
 * is the queueing time in microseconds, `moved_us` the attention time, `total` the number
 * of requesters whose rows were processed together (each the maximum over the daemons),
 * `rows` the number of other daemons that took part. CANCEL ends it; RELEASE before its
 * terminal word has no effect.
 */
#ifndef KVD_RING_LAYOUT_H
#define KVD_RING_LAYOUT_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#define KVD_RING_MAGIC UINT64_C(0x3130474e5244564b) /* "KVDRNG01" */
#define KVD_RING_VERSION 1u
#define KVD_RING_HEADER_BYTES 4096u
#define KVD_RING_ENTRY_BYTES 64u
#define KVD_RING_IDS (UINT64_C(1) << 48)

enum kvd_ring_op {
	/* A descriptor list. a: attach, 0 = own memory; n0: rows; n1: columns of a
	 * row, u64 each: 2 address, bytes; 3 the same and a device, which is ignored;
	 * 4 address, bytes, stride, count. Word: SUCCESS when prepared. */
	KVD_RING_LIST = 1,
	/* A transfer. a, b: local and remote list; n0, n1: numbers of u32 indices into
	 * them, contiguous (0: all rows), followed by `bytes` of notification. Word:
	 * BOOTSTRAPPING until it is posted. */
	KVD_RING_XFER = 2,
	/* a: a transfer that has ended or was never posted; gen: its next generation;
	 * `bytes` of another notification, with KVD_RING_NOTIFIES. */
	KVD_RING_POST = 3,
	KVD_RING_CANCEL = 4,  /* a: a transfer or room; no effect if it has ended */
	KVD_RING_RELEASE = 5, /* a: a transfer (canceled first), a list or a room */
	KVD_RING_NOTIFY = 6,  /* a: attach; `bytes` to its session. No slot. */
	/* A room: by slot and gen; or with gen 0, a: its number, n0: its role, enum
	 * kvd_role. `bytes` of reason, at most 200. */
	KVD_RING_ABORT = 7,
	/* A room in a new slot. a, b: its number and pool, as in the text; text: the
	 * line of room.open without cmd and id; views: its pages, which replace the
	 * line's. */
	KVD_RING_OPEN = 8,
	/* views: destination pages; text: the object of `wait`, if any. c: slot of the
	 * view "aux", with KVD_RING_AUX. */
	KVD_RING_BIND = 9,
	/* The same for a chunk. b: seq; KVD_RING_LAST. */
	KVD_RING_SEND = 10,
	/* Close a room. Its number may be opened again at once. It is aborted if it
	 * has not ended; the slot is free when it has ended. */
	KVD_RING_CLOSE = 11,
	KVD_RING_EXTEND = 12, /* an offer: c: lease_ms, as in room.extend */
	/* a: space; c: number of the first chunk, UINT32_MAX: unknown; payload: n0 ids of
	 * 32 bytes each. */
	KVD_RING_FIND = 16,
	/* The same; b: lease_ms; the ids follow the hold's secret, 16 random bytes.
	 * With n0 0 it joins the hold with this secret. */
	KVD_RING_HOLD = 17,
	/* a: hold; b: pool; c: deadline_ms, 0: none; payload as BIND's. */
	KVD_RING_FETCH = 18,
	/* a: space; b: pool; c: number of the first chunk; payload: n0 ids, then as
	 * BIND's.
	 */
	KVD_RING_PUT = 19,
	/* As HOLD, with at least one id; n1: remote_ms. */
	KVD_RING_HOLD_REMOTE = 21,
	/* a: attention context (attention.open); b: layer; c: 0, or the value of an
	 * ordered request: the daemon reads q when the seat's word `ready` is at least
	 * that, and stores it in the word `done` when the request has ended, after the
	 * status word; n0: seat; n2: deadline_us; payload: n1 parts (struct
	 * kvd_ring_part), then their selections in the same order. Word: TRANSFERRING
	 * when the engine may reuse q; SUCCESS: o, m and l are in the seat. */
	KVD_RING_ATTEND = 24,
};

enum {
	KVD_RING_WRITES = 1 << 0,   /* XFER: local to remote */
	KVD_RING_POSTS = 1 << 1,    /* XFER: and post it */
	KVD_RING_NOTIFIES = 1 << 2, /* XFER, POST: with `bytes` of notification, may be
				     * 0 */
	KVD_RING_LAST = 1 << 3,	    /* SEND: the last chunk */
	KVD_RING_AUX = 1 << 4,	    /* BIND, SEND: c is a slot of the view "aux" */
	KVD_RING_DURABLE = 1 << 5,  /* PUT: succeed only when all is synced to files */
	KVD_RING_PUBLISH = 1 << 6,  /* PUT: as chunk.publish */
};

#define KVD_RING_ID_BYTES 32u
#define KVD_RING_SECRET_BYTES 16u

/* Pages of one view and the range in use; followed by page_count u32 page numbers,
 * padded to 8 bytes, and select_count u32 numbers of tokens of the request, padded alike:
 * FETCH only, ascending, first_token and the token range 0. Then the i-th of them has
 * place i in the pages. */
struct kvd_ring_view {
	char name[32];	      /* NUL-terminated */
	uint64_t first_token; /* of the request, in the first slot of pages[0] */
	uint64_t token_begin, token_end; /* both 0: all tokens of the pages */
	uint32_t layer_begin, layer_end; /* both 0: all layers */
	uint32_t page_count, select_count;
	uint32_t pages[];
};

/* Query rows of a seat, and the chunks of a hold that they attend to. */
struct kvd_ring_part {
	uint64_t hold;
	uint32_t row, rows;
	uint32_t first, count; /* chunks of the hold */
	uint64_t tokens;       /* from the start of the first chunk; 0: all */
	int32_t delta;	       /* position shift of the chunks relative to where they
				* were computed */
	uint32_t per_token;    /* 0: all tokens. Otherwise the number of u32 per query
				* token: tokens of the part, ~0: none */
};

struct kvd_ring_entry {
	uint32_t op, flags;
	uint32_t slot, gen; /* LIST, XFER: the new object's; POST: gen only */
	uint64_t a, b;
	uint64_t offset; /* of the payload in the arena */
	uint32_t n0, n1;
	uint32_t bytes;
	uint32_t n2;
	uint64_t c;
};

struct kvd_ring_header {
	uint64_t magic;
	uint32_t version, entry_bytes;
	uint32_t entries; /* a power of two */
	uint32_t first_slot, slot_count;
	uint32_t reserved0;
	uint64_t arena_bytes;
	uint64_t reserved1[3];
	/* the engine's line */
	uint64_t tail;
	uint64_t reserved2[7];
	/* the daemon's line */
	uint64_t head;
	uint32_t asleep;
	uint32_t reserved3;
	uint64_t reserved4[6];
};

/* Arena bytes used by the entry's payload; UINT64_MAX: overflow. */
static inline uint64_t kvd_ring_payload(const struct kvd_ring_entry *e)
{
	uint64_t bytes = e->bytes;

	if (e->op == KVD_RING_LIST)
		bytes = e->n1 <= 4 ? (uint64_t)e->n0 * e->n1 * 8 : UINT64_MAX;
	else if (e->op == KVD_RING_XFER)
		bytes += ((uint64_t)e->n0 + e->n1) * 4;
	return bytes;
}

/* Bytes of a view in a payload. */
static inline uint64_t kvd_ring_view_bytes(uint32_t page_count, uint32_t select_count)
{
	return sizeof(struct kvd_ring_view) + ((uint64_t)page_count + 1) / 2 * 8 +
	       ((uint64_t)select_count + 1) / 2 * 8;
}

/* The next generation of a slot. */
static inline uint32_t kvd_ring_next_gen(uint32_t gen)
{
	return gen + 1 ? gen + 1 : 1;
}

/* Number of entries that fit. */
static inline uint32_t kvd_ring_room(const struct kvd_ring_header *ring, uint32_t entries,
				     uint64_t tail)
{
	uint64_t used = tail - __atomic_load_n(&ring->head, __ATOMIC_ACQUIRE);

	return used < entries ? entries - (uint32_t)used : 0;
}

/* Submit an entry; the ring must have space. True: the daemon sleeps, write to the
 * eventfd. `entries` and `tail` are the caller's own copies. */
static inline bool kvd_ring_push(struct kvd_ring_header *ring, uint32_t entries,
				 uint64_t tail, const struct kvd_ring_entry *entry)
{
	uint64_t words[KVD_RING_ENTRY_BYTES / 8];
	uint64_t *at =
		(uint64_t *)(void *)((char *)ring + KVD_RING_HEADER_BYTES +
				     (tail & (entries - 1)) * KVD_RING_ENTRY_BYTES);

	memcpy(words, entry, sizeof(words));
	for (unsigned int i = 0; i < KVD_RING_ENTRY_BYTES / 8; i++)
		__atomic_store_n(&at[i], words[i], __ATOMIC_RELAXED);
	/* the daemon sets `asleep`, then reads the tail; the engine does the reverse */
	__atomic_store_n(&ring->tail, tail + 1, __ATOMIC_SEQ_CST);
	return __atomic_load_n(&ring->asleep, __ATOMIC_SEQ_CST) != 0;
}

#endif
