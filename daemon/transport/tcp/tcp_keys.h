/* SPDX-License-Identifier: Apache-2.0 */
/*
 * tcp_keys: how the two ends of a data connection authenticate each other, and the keys
 * of their records. Pure but for OpenSSL; the caller brings the random bytes.
 *
 * Both tokens of a peering were exchanged in the handshake, each from the side that
 * minted it, so only the two ends know them (without CURVE: also an eavesdropper). No
 * token is ever sent. All keys are HKDF-SHA256's (RFC 5869), each with its own label:
 *
 *   peering  = extract("kvd tcp 2", dialer's token, dialed's token)
 *     id     = expand(peering, "id"): names the peering in CONTROL and WELCOME
 *   session  = extract(SHA-256(CONTROL, WELCOME), peering)
 *     id     = expand(session, "session id"): in STREAM and STREAM_OK
 *   stream   = extract(SHA-256(STREAM, STREAM_OK), session)
 *   traffic  = expand(session or stream, "dialer" or "dialed", connection's number)
 *
 * Every hello has 32 random bytes of its sender, and ends with an HMAC under the key
 * available by then, over it and the one that it answers. So a modified hello, also one
 * with changed requirements, is refused; and as both sides' random bytes are in every
 * key, no key of a connection is one of another's.
 */
#ifndef KVD_TRANSPORT_TCP_KEYS_H
#define KVD_TRANSPORT_TCP_KEYS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/transport/tcp/tcp_wire.h"
#include "daemon/transport/transport.h"

#define TCP_SECRET_BYTES 32u

struct tcp_secret {
	uint8_t bytes[TCP_SECRET_BYTES];
};

/* The keys of a connection's two directions. */
struct tcp_traffic {
	struct tcp_secret dialer, dialed; /* by sender */
};

struct tcp_keys {
	struct tcp_secret peering, session;
	uint8_t id[TCP_ID_BYTES], session_id[TCP_ID_BYTES];
	uint8_t control[TCP_HELLO_BYTES]; /* as it was sent */
	struct tcp_traffic line;
};

/* Once, before anything else here; ERR_REQUIRE: this OpenSSL lacks a required
 * algorithm. */
int tcp_keys_open(void);
/* All others: 0, ERR_NOMEM (OpenSSL fails for nothing else), or as their comment states.
 */
int tcp_keys_begin(struct tcp_keys *keys, const uint8_t dialer[XP_TOKEN_BYTES],
		   const uint8_t dialed[XP_TOKEN_BYTES]);
void tcp_keys_wipe(struct tcp_keys *keys);
void tcp_traffic_wipe(struct tcp_traffic *traffic);

/* ---- the control line ---- */
/* The dialer's first. `hello` has its requirements and random bytes; id and proof are
 * set. */
int tcp_keys_control(struct tcp_keys *keys, struct tcp_hello *hello,
		     uint8_t buf[TCP_HELLO_BYTES]);
/* Is it for this peering? Then tcp_keys_take_control() verifies that: ERR_AUTH when it is
 * not. */
bool tcp_keys_named(const struct tcp_keys *keys, const struct tcp_hello *hello);
int tcp_keys_take_control(struct tcp_keys *keys, const uint8_t buf[TCP_HELLO_BYTES]);
/* The dialed side's answer; then the session and its line's keys are available. */
int tcp_keys_welcome(struct tcp_keys *keys, struct tcp_hello *hello,
		     uint8_t buf[TCP_HELLO_BYTES]);
int tcp_keys_take_welcome(struct tcp_keys *keys, const uint8_t buf[TCP_HELLO_BYTES]);

/* ---- its streams ---- */
int tcp_keys_stream(const struct tcp_keys *keys, struct tcp_hello *hello,
		    uint8_t buf[TCP_HELLO_BYTES]);
bool tcp_keys_session_named(const struct tcp_keys *keys, const struct tcp_hello *hello);
int tcp_keys_take_stream(const struct tcp_keys *keys, const uint8_t buf[TCP_HELLO_BYTES]);
/* `asked` is the STREAM hello that it answers. */
int tcp_keys_stream_ok(const struct tcp_keys *keys, const uint8_t asked[TCP_HELLO_BYTES],
		       struct tcp_hello *hello, uint8_t buf[TCP_HELLO_BYTES],
		       struct tcp_traffic *traffic_p);
int tcp_keys_take_stream_ok(const struct tcp_keys *keys,
			    const uint8_t asked[TCP_HELLO_BYTES],
			    const uint8_t buf[TCP_HELLO_BYTES],
			    struct tcp_traffic *traffic_p);

/* ---- HKDF-SHA256 ---- */
int tcp_hkdf_extract(const void *salt, size_t salt_len, const void *key, size_t key_len,
		     struct tcp_secret *secret_p);
int tcp_hkdf_expand(const void *key, size_t key_len, const void *info, size_t info_len,
		    void *out, size_t len);
/* With "kvd tcp ", the label and a number as info. */
int tcp_keys_derive(const struct tcp_secret *from, const char *label, uint32_t number,
		    void *out, size_t len);

#endif
