/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The schedule is a reduced form of TLS 1.3's: the transcript is hashed into every key,
 * so two ends with different hellos share none.
 *
 * A dialer's CONTROL can be replayed by an observer. It only opens a connection: its
 * streams need a key of the session, which has random bytes of both sides. No transfer is
 * taken before all streams are there (tcp_peer_joined).
 *
 * OpenSSL looks its algorithms up by name, which takes a lock and longer than a key:
 * once, here. Its configuration file is not read: it is meant for other programs.
 */
#include "daemon/transport/tcp/tcp_keys.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "daemon/base/cursor.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/transport/tcp/tcp_openssl.h"

#define SALT "kvd tcp 2"
#define INFO_MAX 64u
#define BARE_BYTES (TCP_HELLO_BYTES - TCP_PROOF_BYTES)

static EVP_KDF *kdf;
static pthread_once_t once = PTHREAD_ONCE_INIT;

static void keys_fetch(void)
{
	/* other threads may be running when a process exits */
	if (OPENSSL_init_crypto(OPENSSL_INIT_NO_LOAD_CONFIG | OPENSSL_INIT_NO_ATEXIT,
				NULL))
		kdf = EVP_KDF_fetch(NULL, "HKDF", NULL);
}

/* Memory that libcrypto keeps for the thread that ends the process. */
__attribute__((destructor)) static void thread_end(void)
{
	OPENSSL_thread_stop();
}

int tcp_keys_open(void)
{
	pthread_once(&once, keys_fetch);
	return kdf ? 0
		   : err_raise(ERR_REQUIRE, "tcp: this OpenSSL's libcrypto has no HKDF");
}

static int failed(void)
{
	return err_raise(ERR_NOMEM, "tcp: OpenSSL: out of memory");
}

/* ---- HKDF ---- */

static int derive(int mode, const void *key, size_t key_len, const char *name,
		  const void *value, size_t value_len, void *out, size_t len)
{
	EVP_KDF_CTX *ctx = kdf ? EVP_KDF_CTX_new(kdf) : NULL;
	/* OpenSSL's parameters are not const, and only read */
	OSSL_PARAM params[] = {
		OSSL_PARAM_construct_int(OSSL_KDF_PARAM_MODE, &mode),
		OSSL_PARAM_construct_utf8_string(OSSL_KDF_PARAM_DIGEST,
						 (char[]){"SHA256"}, 0),
		OSSL_PARAM_construct_octet_string(OSSL_KDF_PARAM_KEY,
						  (void *)(uintptr_t)key, key_len),
		OSSL_PARAM_construct_octet_string(name, (void *)(uintptr_t)value,
						  value_len),
		OSSL_PARAM_construct_end(),
	};
	bool ok = ctx && EVP_KDF_derive(ctx, out, len, params) > 0;

	EVP_KDF_CTX_free(ctx);
	return ok ? 0 : failed();
}

int tcp_hkdf_extract(const void *salt, size_t salt_len, const void *key, size_t key_len,
		     struct tcp_secret *secret_p)
{
	return err_pass(derive(EVP_KDF_HKDF_MODE_EXTRACT_ONLY, key, key_len,
			       OSSL_KDF_PARAM_SALT, salt, salt_len, secret_p->bytes,
			       TCP_SECRET_BYTES));
}

int tcp_hkdf_expand(const void *key, size_t key_len, const void *info, size_t info_len,
		    void *out, size_t len)
{
	return err_pass(derive(EVP_KDF_HKDF_MODE_EXPAND_ONLY, key, key_len,
			       OSSL_KDF_PARAM_INFO, info, info_len, out, len));
}

int tcp_keys_derive(const struct tcp_secret *from, const char *label, uint32_t number,
		    void *out, size_t len)
{
	char info[INFO_MAX];
	size_t n = (size_t)snprintf(info, sizeof(info) - sizeof(number), "kvd tcp %s",
				    label) +
		   1;
	struct cursor c;

	cursor_write(&c, info + n, sizeof(number));
	cursor_put_u32(&c, number);
	return err_pass(tcp_hkdf_expand(from->bytes, TCP_SECRET_BYTES, info,
					n + sizeof(number), out, len));
}

/* ---- hellos ---- */

/* Of a hello, and of the one that it answers (NULL: none). */
static int proof_of(const struct tcp_secret *from, const char *label,
		    const uint8_t *before, const uint8_t *bare,
		    uint8_t proof[TCP_PROOF_BYTES])
{
	uint8_t said[TCP_HELLO_BYTES + BARE_BYTES], key[TCP_SECRET_BYTES];
	size_t len = 0;
	int r = tcp_keys_derive(from, label, 0, key, sizeof(key));

	if (before)
		memcpy(said, before, len = TCP_HELLO_BYTES);
	memcpy(said + len, bare, BARE_BYTES);
	if (r == 0 &&
	    !HMAC(EVP_sha256(), key, sizeof(key), said, len + BARE_BYTES, proof, NULL))
		r = failed();
	OPENSSL_cleanse(key, sizeof(key));
	return err_pass(r);
}

static int prove(const struct tcp_secret *from, const char *label, const uint8_t *before,
		 struct tcp_hello *hello, uint8_t buf[TCP_HELLO_BYTES])
{
	int r;

	tcp_hello_put(hello, buf);
	r = proof_of(from, label, before, buf, hello->proof);
	if (r == 0)
		tcp_hello_put(hello, buf);
	return err_pass(r);
}

static int check(const struct tcp_secret *from, const char *label, const uint8_t *before,
		 const uint8_t buf[TCP_HELLO_BYTES])
{
	uint8_t proof[TCP_PROOF_BYTES];
	int r = proof_of(from, label, before, buf, proof);

	if (r == 0 && !mem_equal(proof, buf + BARE_BYTES, sizeof(proof)))
		r = err_raise(ERR_AUTH,
			      "tcp: authentication failed: the proof in a %s "
			      "does not fit the handshake's tokens",
			      label);
	return err_pass(r);
}

/* The transcript of both sides is the salt of the following keys. */
static int advance(const struct tcp_secret *from, const uint8_t first[TCP_HELLO_BYTES],
		   const uint8_t second[TCP_HELLO_BYTES], struct tcp_secret *secret_p)
{
	uint8_t said[2 * TCP_HELLO_BYTES], salt[EVP_MAX_MD_SIZE];
	unsigned int len = 0;

	memcpy(said, first, TCP_HELLO_BYTES);
	memcpy(said + TCP_HELLO_BYTES, second, TCP_HELLO_BYTES);
	if (!EVP_Digest(said, sizeof(said), salt, &len, EVP_sha256(), NULL))
		return failed();
	return err_pass(
		tcp_hkdf_extract(salt, len, from->bytes, TCP_SECRET_BYTES, secret_p));
}

static int traffic(const struct tcp_secret *from, uint32_t number,
		   struct tcp_traffic *traffic_p)
{
	int r = tcp_keys_derive(from, "dialer", number, traffic_p->dialer.bytes,
				TCP_SECRET_BYTES);

	if (r == 0)
		r = tcp_keys_derive(from, "dialed", number, traffic_p->dialed.bytes,
				    TCP_SECRET_BYTES);
	return err_pass(r);
}

/* ---- a peering ---- */

int tcp_keys_begin(struct tcp_keys *keys, const uint8_t dialer[XP_TOKEN_BYTES],
		   const uint8_t dialed[XP_TOKEN_BYTES])
{
	uint8_t both[2 * XP_TOKEN_BYTES];
	int r;

	memset(keys, 0, sizeof(*keys));
	memcpy(both, dialer, XP_TOKEN_BYTES);
	memcpy(both + XP_TOKEN_BYTES, dialed, XP_TOKEN_BYTES);
	r = tcp_hkdf_extract(SALT, sizeof(SALT) - 1, both, sizeof(both), &keys->peering);
	OPENSSL_cleanse(both, sizeof(both));
	if (r == 0)
		r = tcp_keys_derive(&keys->peering, "id", 0, keys->id, sizeof(keys->id));
	return err_pass(r);
}

void tcp_keys_wipe(struct tcp_keys *keys)
{
	OPENSSL_cleanse(keys, sizeof(*keys));
}

void tcp_traffic_wipe(struct tcp_traffic *traffic)
{
	OPENSSL_cleanse(traffic, sizeof(*traffic));
}

/* ---- the control line ---- */

int tcp_keys_control(struct tcp_keys *keys, struct tcp_hello *hello,
		     uint8_t buf[TCP_HELLO_BYTES])
{
	int r;

	memcpy(hello->id, keys->id, TCP_ID_BYTES);
	r = prove(&keys->peering, "control", NULL, hello, buf);
	if (r == 0)
		memcpy(keys->control, buf, TCP_HELLO_BYTES);
	return err_pass(r);
}

bool tcp_keys_named(const struct tcp_keys *keys, const struct tcp_hello *hello)
{
	return mem_equal(keys->id, hello->id, TCP_ID_BYTES);
}

int tcp_keys_take_control(struct tcp_keys *keys, const uint8_t buf[TCP_HELLO_BYTES])
{
	int r = check(&keys->peering, "control", NULL, buf);

	if (r == 0)
		memcpy(keys->control, buf, TCP_HELLO_BYTES);
	return err_pass(r);
}

static int session_begin(struct tcp_keys *keys, const uint8_t welcome[TCP_HELLO_BYTES])
{
	int r = advance(&keys->peering, keys->control, welcome, &keys->session);

	if (r == 0)
		r = tcp_keys_derive(&keys->session, "session id", 0, keys->session_id,
				    sizeof(keys->session_id));
	if (r == 0)
		r = traffic(&keys->session, 0, &keys->line);
	return err_pass(r);
}

int tcp_keys_welcome(struct tcp_keys *keys, struct tcp_hello *hello,
		     uint8_t buf[TCP_HELLO_BYTES])
{
	int r;

	memcpy(hello->id, keys->id, TCP_ID_BYTES);
	r = prove(&keys->peering, "welcome", keys->control, hello, buf);
	if (r == 0)
		r = session_begin(keys, buf);
	return err_pass(r);
}

int tcp_keys_take_welcome(struct tcp_keys *keys, const uint8_t buf[TCP_HELLO_BYTES])
{
	int r = check(&keys->peering, "welcome", keys->control, buf);

	if (r == 0)
		r = session_begin(keys, buf);
	return err_pass(r);
}

/* ---- its streams ---- */

int tcp_keys_stream(const struct tcp_keys *keys, struct tcp_hello *hello,
		    uint8_t buf[TCP_HELLO_BYTES])
{
	memcpy(hello->id, keys->session_id, TCP_ID_BYTES);
	return err_pass(prove(&keys->session, "stream", NULL, hello, buf));
}

bool tcp_keys_session_named(const struct tcp_keys *keys, const struct tcp_hello *hello)
{
	return mem_equal(keys->session_id, hello->id, TCP_ID_BYTES);
}

int tcp_keys_take_stream(const struct tcp_keys *keys, const uint8_t buf[TCP_HELLO_BYTES])
{
	return err_pass(check(&keys->session, "stream", NULL, buf));
}

/* Line 0 has its keys of the session, stream n those of number n + 1. */
static int stream_traffic(const struct tcp_keys *keys,
			  const uint8_t asked[TCP_HELLO_BYTES],
			  const uint8_t answer[TCP_HELLO_BYTES],
			  struct tcp_traffic *traffic_p)
{
	struct tcp_secret stream;
	struct tcp_hello hello;
	int r = tcp_hello_get(asked, &hello);

	if (r == 0)
		r = advance(&keys->session, asked, answer, &stream);
	if (r == 0)
		r = traffic(&stream, hello.number + 1u, traffic_p);
	OPENSSL_cleanse(&stream, sizeof(stream));
	return err_pass(r);
}

int tcp_keys_stream_ok(const struct tcp_keys *keys, const uint8_t asked[TCP_HELLO_BYTES],
		       struct tcp_hello *hello, uint8_t buf[TCP_HELLO_BYTES],
		       struct tcp_traffic *traffic_p)
{
	int r;

	memcpy(hello->id, keys->session_id, TCP_ID_BYTES);
	r = prove(&keys->session, "stream's answer", asked, hello, buf);
	if (r == 0)
		r = stream_traffic(keys, asked, buf, traffic_p);
	return err_pass(r);
}

int tcp_keys_take_stream_ok(const struct tcp_keys *keys,
			    const uint8_t asked[TCP_HELLO_BYTES],
			    const uint8_t buf[TCP_HELLO_BYTES],
			    struct tcp_traffic *traffic_p)
{
	int r = check(&keys->session, "stream's answer", asked, buf);

	if (r == 0)
		r = stream_traffic(keys, asked, buf, traffic_p);
	return err_pass(r);
}
