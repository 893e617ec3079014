/* SPDX-License-Identifier: Apache-2.0 */
/* base64: RFC 4648, section 4, with padding: bytes inside JSON strings. */
#ifndef KVD_PROTO_BASE64_H
#define KVD_PROTO_BASE64_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define BASE64_CHARS(bytes) (((bytes) + 2) / 3 * 4) /* without the NUL */

/* Writes BASE64_CHARS(len) characters and a NUL. */
void base64_encode(const void *data, size_t len, char *out);
/* Strict: padded, no white space, no excess bits. `out` holds 3 bytes for each 4
 * characters. False: not base64. */
bool base64_decode(const char *text, size_t text_len, uint8_t *out, size_t *len_p);

#endif
