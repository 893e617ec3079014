/* SPDX-License-Identifier: Apache-2.0 */
/* tcp_openssl: OpenSSL's headers, because one of its types has the name of a code of
 * err.h. */
#ifndef KVD_TRANSPORT_TCP_OPENSSL_H
#define KVD_TRANSPORT_TCP_OPENSSL_H

#define ERR_STATE OPENSSL_ERR_STATE
#include <openssl/core_names.h>
#include <openssl/crypto.h>
#include <openssl/evp.h>
#include <openssl/hmac.h>
#include <openssl/kdf.h>
#undef ERR_STATE

#endif
