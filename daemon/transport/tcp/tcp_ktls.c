/* SPDX-License-Identifier: Apache-2.0 */
/* TLS_RX_EXPECT_NO_PAD stays off: with it a kernel decrypts into the rows before it knows
 * whether the record is authentic. */
#include "daemon/transport/tcp/tcp_ktls.h"

#include <errno.h>
#include <linux/tls.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/transport/tcp/tcp_openssl.h"
#include "daemon/transport/tcp/tcp_seal.h"

/* linux/tls.h has the nonce in two parts: `salt`, and behind it `iv` */
_Static_assert(TLS_CIPHER_AES_GCM_128_SALT_SIZE + TLS_CIPHER_AES_GCM_128_IV_SIZE ==
		       TCP_IV_BYTES,
	       "nonce");
_Static_assert(TLS_CIPHER_AES_GCM_128_KEY_SIZE == TCP_KEY_BYTES, "key");

bool tcp_ktls_begin(int fd)
{
	return setsockopt(fd, IPPROTO_TCP, TCP_ULP, "tls", sizeof("tls")) == 0;
}

bool tcp_ktls_there(void)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	/* it is probed first, and then accepts connected sockets only */
	bool there = fd >= 0 && !tcp_ktls_begin(fd) && errno == ENOTCONN;

	if (fd >= 0)
		close(fd);
	return there;
}

static bool take(int fd, int direction, const struct tcp_secret *secret)
{
	struct tls12_crypto_info_aes_gcm_128 info = {
		.info = {.version = TLS_1_3_VERSION,
			 .cipher_type = TLS_CIPHER_AES_GCM_128}};
	uint8_t iv[TCP_IV_BYTES];
	bool taken = false;

	if (tcp_seal_key(secret, info.key, iv) < 0) {
		err_clear();
	} else {
		memcpy(info.salt, iv, sizeof(info.salt));
		memcpy(info.iv, iv + sizeof(info.salt), sizeof(info.iv));
		taken = setsockopt(fd, SOL_TLS, direction, &info, sizeof(info)) == 0;
	}
	OPENSSL_cleanse(&info, sizeof(info));
	OPENSSL_cleanse(iv, sizeof(iv));
	return taken;
}

bool tcp_ktls_send(int fd, const struct tcp_secret *secret)
{
	return take(fd, TLS_TX, secret);
}

bool tcp_ktls_receive(int fd, const struct tcp_secret *secret)
{
	return take(fd, TLS_RX, secret);
}
