/* SPDX-License-Identifier: Apache-2.0 */
/* hex: bytes as digits, and UUIDs (RFC 9562: 8-4-4-4-12 digits). */
#ifndef KVD_BASE_HEX_H
#define KVD_BASE_HEX_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HEX_CHARS(bytes) (2 * (bytes)) /* without the NUL */
#define UUID_BYTES 16u
#define UUID_CHARS 36u /* without the NUL */

/* Writes 2 * len lower-case digits and a NUL. */
void hex_write(const void *bytes, size_t len, char *text);
/* Of either case; -1: not a digit. */
int hex_digit(char c);
/* From exactly 2 * len digits of either case, ignoring the rest. False: not digits. */
bool hex_read(const char *text, void *bytes, size_t len);

void uuid_write(const uint8_t uuid[UUID_BYTES], char text[UUID_CHARS + 1]);
/* The whole text. False: not a UUID. */
bool uuid_read(const char *text, uint8_t uuid[UUID_BYTES]);

#endif
