/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The table of peer messages. proto/wire.[ch] derives a struct, an encoder, a decoder and
 * the reference page's rows from it.
 *
 * WIRE_MESSAGES(M): M(number, NAME, name, OWNER, body cap in bytes, purpose)
 * WIRE_<NAME>(F):   F(type, field) in wire order. Types:
 *   u8 u16 u32 u64   little-endian
 *   id               16 bytes (instance, token, secret, boot id)
 *   str              at most WIRE_STR_MAX - 1 bytes of text
 *   blob             bytes in place: pointer + length, at most the body cap
 * A receiver skips fields that a newer sender adds after the last known one. Numbers
 * never change.
 */
#ifndef KVD_PROTO_WIRE_TABLE_H
#define KVD_PROTO_WIRE_TABLE_H

/* The part of the daemon that processes a message (WIRE_OWNER_…). */
#define WIRE_OWNERS(O) O(PEER) O(HANDSHAKE) O(ROOM) O(XFER) O(STORE) O(ATTEND)

/* Numbers of removed messages are not reused: 11, 12, 28 to 30, 46 to 51. */
/* clang-format off */
#define WIRE_MESSAGES(M) \
	M(1, HELLO, hello, PEER, 65536, \
	  "first message of a connecting daemon: its identity") \
	M(2, WELCOME, welcome, PEER, 65536, "reply to HELLO") \
	M(3, PING, ping, PEER, 64, "liveness probe") \
	M(4, PONG, pong, PEER, 64, "reply to PING") \
	M(5, BYE, bye, PEER, 1024, "the sender closes the peering, with the reason") \
	M(6, REGISTER, register, HANDSHAKE, 1048000, \
	  "a pool or the regions of a session, with keys") \
	M(7, REGISTER_ACK, register_ack, HANDSHAKE, 64, \
	  "the receiver can use the object") \
	M(8, REGISTER_NAK, register_nak, HANDSHAKE, 1024, \
	  "the object was refused, with the reason") \
	M(9, UNREGISTER, unregister, HANDSHAKE, 64, \
	  "the object is being removed; stop using it") \
	M(10, UNREGISTER_ACK, unregister_ack, HANDSHAKE, 64, \
	  "the receiver has stopped using the object") \
	M(13, TRANSFER_INFO, transfer_info, ROOM, 1048000, \
	  "the pages and wants of a receiver") \
	M(14, TRANSFER_INFO_ACK, transfer_info_ack, ROOM, 64, \
	  "the sender accepted TRANSFER_INFO") \
	M(15, TRANSFER_INFO_NAK, transfer_info_nak, ROOM, 1024, \
	  "the sender refused TRANSFER_INFO") \
	M(16, ROOM_DONE, room_done, ROOM, 64, "the receiver has all bytes of the room") \
	M(17, ABORT, abort, ROOM, 1024, "this side aborts the room; stop its I/O") \
	M(18, ABORT_ACK, abort_ack, ROOM, 64, "I/O of the room has stopped") \
	M(19, OFFER_QUERY, offer_query, ROOM, 1024, "a puller requests an offer") \
	M(20, OFFER, offer, ROOM, 1048000, "pages, generation and lease of the offer") \
	M(21, PULL_DONE, pull_done, ROOM, 1024, \
	  "the puller has read the pages and asks whether they are valid, or gives up") \
	M(22, PULL_ACK, pull_ack, ROOM, 1024, \
	  "the lease was valid throughout, or the refusal") \
	M(23, LEASE, lease, ROOM, 64, "heartbeat of a puller: extend the lease") \
	M(24, ATTACH, attach, XFER, 256, \
	  "request to attach to a session, with its secret") \
	M(25, ATTACH_ACK, attach_ack, XFER, 64, \
	  "attached; sent after the REGISTERs of its regions") \
	M(26, ATTACH_NAK, attach_nak, XFER, 1024, "attach refused, with the reason") \
	M(27, OFFER_NAK, offer_nak, ROOM, 1024, "unknown offer, or pages outside it") \
	M(31, PART, part, PEER, 1048000, \
	  "a fragment of a message too long for one turn") \
	M(32, LINE, line, HANDSHAKE, 1024, \
	  "transport of the data connection, or why there is none") \
	M(33, CHUNK_LOOKUP, chunk_lookup, STORE, 140000, \
	  "query for chunks, which are held") \
	M(34, CHUNK_LOOKUP_ACK, chunk_lookup_ack, STORE, 140000, \
	  "chunks found, and their location") \
	M(35, CHUNK_OFFER, chunk_offer, STORE, 256, \
	  "request to offer these chunks of a hold") \
	M(36, CHUNK_OFFER_NAK, chunk_offer_nak, STORE, 1024, \
	  "chunk offer refused, with the reason") \
	M(37, CHUNK_RELEASE, chunk_release, STORE, 64, \
	  "the requester releases the hold") \
	M(38, INDEX_QUERY, index_query, STORE, 1024, \
	  "query to an index node: holders of these chunks") \
	M(39, INDEX_REPLY, index_reply, STORE, 16384, \
	  "reply of an index node: the holders") \
	M(40, INDEX_UPDATE, index_update, STORE, 16384, \
	  "update to an index node: chunks added and removed") \
	M(41, INDEX_DIGEST, index_digest, STORE, 64, \
	  "digest of all updates sent to an index node") \
	M(42, INDEX_DIGEST_ACK, index_digest_ack, STORE, 64, \
	  "the index node agrees, or needs a full resynchronisation") \
	M(43, ATTEND, attend, ATTEND, 600000, \
	  "query rows, for attention over chunks of a hold") \
	M(44, ATTENTION_RESULT, attention_result, ATTEND, 1000000, \
	  "attention result for these chunks") \
	M(45, ATTENTION_CANCEL, attention_cancel, ATTEND, 64, \
	  "the requester cancels the attention request") \
	M(52, POOLS, pools, HANDSHAKE, 64, \
	  "all pools of the sender have been sent as REGISTERs")

/* addresses: count u32, then {str transport, blob address}; product: "kvd 0.1.0" */
#define WIRE_HELLO(F)                                                              \
	F(u16, version_min) F(u16, version_max) F(u64, features) F(u64, nonce)     \
	F(id, boot_id) F(id, token) F(str, name) F(str, endpoint) F(blob, addresses) \
	F(str, product)
#define WIRE_WELCOME(F) WIRE_HELLO(F)
#define WIRE_PING(F) F(u64, stamp)
#define WIRE_PONG(F) F(u64, stamp)
#define WIRE_BYE(F) F(u32, code) F(str, text)
/* kind: 0 pool, 1 session, 2 pool of the daemon itself, addressed only by its id.
 * layout: layout_encode(), empty for a session. regions: count u32, {u64 region, u64
 * address, u64 length, u8 kind, blob key}; buffers (pools): count u32, {u32 index into
 * regions, u64 offset, u64 length} */
#define WIRE_REGISTER(F)                                                           \
	F(u64, object) F(u8, kind) F(u64, session) F(str, name) F(str, transport)  \
	F(blob, layout) F(blob, regions) F(blob, buffers)
/* pools: their number. Sent once per peering, when the data connection's transport is
 * known; pools registered later follow it */
#define WIRE_POOLS(F) F(u32, pools)
#define WIRE_REGISTER_ACK(F) F(u64, object)
#define WIRE_REGISTER_NAK(F) F(u64, object) F(u64, local_object) F(u32, code) F(str, text)
#define WIRE_UNREGISTER(F) F(u64, object)
#define WIRE_UNREGISTER_ACK(F) F(u64, object)
/* type and total: of the message; at: offset of these bytes in its body. Fragments are
 * in order, and a sender has one fragmented message at a time */
#define WIRE_PART(F) F(u16, type) F(u32, total) F(u32, at) F(blob, bytes)
/* From the side with the lower instance id, before any REGISTER of either side, and
 * again for each further attempt to connect. text: transports that failed; with a
 * code: why there is no transport. turn: number of earlier attempts; the side that
 * sent the first LINE dials in even turns. tried: why its own previous attempt failed.
 * From the other side: with code and text, why its attempt of that turn failed */
#define WIRE_LINE(F) \
	F(str, transport) F(u32, code) F(str, text) F(u32, turn) F(str, tried)
/* request_id, traceparent: of the engine's request, "" = none. views: count u32, {str
 * name, u64 first_token, u64 token_begin, u64 token_end, blob pages as runs {u32 page,
 * u32 count}}; wants: count u32, plan_want. named: how the engine named src_pool,
 * POOL_BY_… of handshake.h: refused if it selects another pool there. ticket: from
 * room.open, zeroes = none */
#define WIRE_TRANSFER_INFO(F)                                                      \
	F(u64, room) F(u64, recv_gen) F(u64, src_pool) F(u64, dst_pool)            \
	F(u32, receivers) F(u8, named) F(blob, views) F(blob, wants)               \
	F(str, request_id) F(str, traceparent) F(id, ticket)
#define WIRE_TRANSFER_INFO_ACK(F)                                                  \
	F(u64, room) F(u64, recv_gen) F(u64, src_pool) F(u64, send_gen)
#define WIRE_TRANSFER_INFO_NAK(F)                                                  \
	F(u64, room) F(u64, recv_gen) F(u64, src_pool) F(u32, code) F(str, text)
#define WIRE_ROOM_DONE(F) F(u64, room) F(u64, recv_gen) F(u64, src_pool)
/* from_role: enum room_role; to_gen 0 = any holder of the sender's generation. Of a
 * receiver unknown to the source: pool is the source's, 0 = the pool of any room of
 * the number, limited to this session if that is not 0; code 0: it withdraws its
 * earlier ABORT of that generation. from_pool: the receiver's pool; a room accepts one
 * generation per pool, and another pool belongs to another room */
#define WIRE_ABORT(F)                                                              \
	F(u64, room) F(u8, from_role) F(u64, from_gen) F(u64, to_gen) F(u64, pool) \
	F(u64, session) F(u32, code) F(str, text) F(id, ticket) F(u64, from_pool)
/* to_gen: the generation that sent the ABORT */
#define WIRE_ABORT_ACK(F) F(u64, room) F(u64, to_gen)
#define WIRE_OFFER_QUERY(F)                                                        \
	F(u64, room) F(u64, pull_gen) F(u64, src_pool) F(u64, dst_pool)            \
	F(u32, receivers) F(u8, named) F(str, request_id) F(str, traceparent)      \
	F(id, ticket)
/* views as in TRANSFER_INFO */
#define WIRE_OFFER(F)                                                              \
	F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u64, src_pool)           \
	F(u64, lease_epoch) F(u64, lease_ms) F(blob, views)
#define WIRE_OFFER_NAK(F)                                                          \
	F(u64, room) F(u64, pull_gen) F(u64, src_pool) F(u32, code) F(str, text)
#define WIRE_PULL_DONE(F)                                                          \
	F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u64, lease_epoch) F(u32, code) \
	F(str, text)
#define WIRE_PULL_ACK(F)                                                           \
	F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u32, code) F(str, text)
#define WIRE_LEASE(F) F(u64, room) F(u64, pull_gen) F(u64, offer_gen) F(u64, lease_epoch)
#define WIRE_ATTACH(F) F(u64, cookie) F(u64, session) F(id, secret)
#define WIRE_ATTACH_ACK(F) F(u64, cookie) F(u64, session)
#define WIRE_ATTACH_NAK(F) F(u64, cookie) F(u64, session) F(u32, code) F(str, text)
/* space: the first 16 bytes of SHA-256 of its text, which includes the user's name;
 * ids: 32 bytes each; none: extend the hold `ask` by this lease, without a reply. first:
 * with CHUNK_LOOKUP_ANYWHERE a number in the requester's hold, and the chunks have no
 * position in their prompt */
#define CHUNK_LOOKUP_ANYWHERE (UINT64_C(1) << 63)
#define WIRE_CHUNK_LOOKUP(F)                                                          \
	F(u64, ask) F(id, space) F(u64, first) F(u64, lease_ms) F(blob, ids)
/* runs: pools count u32, {u64 pool}; then count u32, {u32 chunks, u64 mask of pools}:
 * consecutive chunks from the first one, each present in all of these pools */
#define WIRE_CHUNK_LOOKUP_ACK(F)                                                         \
	F(u64, ask) F(u32, code) F(str, text) F(u64, tokens) F(blob, runs)
/* chunks first … first + count - 1 of the hold and their tokens [begin, end), in one
 * pool: an offer of that number; a peer that presents the ticket may pull it */
#define WIRE_CHUNK_OFFER(F)                                                          \
	F(u64, ask) F(u64, room) F(u64, pool) F(u32, first) F(u32, count) F(u64, begin) \
	F(u64, end) F(id, ticket)
#define WIRE_CHUNK_OFFER_NAK(F) F(u64, ask) F(u64, room) F(u32, code) F(str, text)
#define WIRE_CHUNK_RELEASE(F) F(u64, ask)
/* space, ids: a chunk's key, see daemon/store/home_key.h; ids: u64 each, the most
 * important first */
#define WIRE_INDEX_QUERY(F) F(u64, ask) F(u64, space) F(blob, ids)
/* holders: count u32, {str endpoint}; then for each id u8 count, {u8 holder}; empty:
 * the daemon is not an index node */
#define WIRE_INDEX_REPLY(F) F(u64, ask) F(blob, holders)
/* anew: discard all earlier updates. notes: {u64 id, u64 space}; the highest bit of
 * space: added, otherwise removed */
#define WIRE_INDEX_UPDATE(F) F(u8, anew) F(blob, notes)
/* of the chunks present: their number, and their mixed keys combined by xor */
#define WIRE_INDEX_DIGEST(F) F(u64, count) F(u64, sum)
/* again: 0: equal; 1: full resynchronisation needed; 2: the daemon is not an index
 * node */
#define WIRE_INDEX_DIGEST_ACK(F) F(u8, again)
/* ask, pool: as in CHUNK_OFFER. The chunks [first, first + count) of the hold, up to
 * `tokens` tokens. count 0: an echo of q; or, with a form, a request for the speed of
 * attention in host memory (pool 0) or GPU memory (pool 1). form: u8 kind, q_type,
 * kv_type, out_bf16; u16 heads, kv_heads, dqk, dv; u32 first_head; f32 scale, softcap;
 * str key, value, key_scale, value_scale: fields. rope, if delta is not 0: u32 first,
 * dims, u8 pairs, then dims / 2 f64. select: per_token u32 for each query token, or
 * empty. q: rows of dqk */
#define WIRE_ATTEND(F)                                                             \
	F(u64, attend) F(u64, ask) F(u64, pool) F(u32, first) F(u32, count)        \
	F(u64, tokens) F(str, view) F(u32, layer) F(u32, rows) F(u32, delta)       \
	F(u32, per_token) F(blob, form) F(blob, rope) F(blob, select) F(blob, q)
/* values: rows of dv f32 (bf16 with the form's out_bf16), then a maximum and a sum,
 * f32, for each row; empty with a code. queue_us, attend_us: queueing and attention
 * time of the rows; together: number of requesters with rows for the same KV */
#define WIRE_ATTENTION_RESULT(F)                                                   \
	F(u64, attend) F(u32, queue_us) F(u32, attend_us) F(u32, together)         \
	F(u32, code) F(str, text) F(blob, values)
#define WIRE_ATTENTION_CANCEL(F) F(u64, attend)
/* clang-format on */

#endif
