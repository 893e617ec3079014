/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/metrics/page.h"

#include <stdint.h>
#include <string.h>
#include <sys/random.h>

#include "daemon/base/hex.h"
#include "daemon/base/text.h"

__asm__(".section .rodata\n"
	".globl metrics_page\n"
	"metrics_page:\n"
	".incbin \"daemon/metrics/page.html\"\n"
	".byte 0\n"
	".previous\n");
extern const char metrics_page[];

static const char mark[] = "@NONCE@";

void page_make(struct text *out, char nonce[PAGE_NONCE_CHARS + 1])
{
	uint8_t random[PAGE_NONCE_CHARS / 2];
	const char *at = metrics_page, *next;

	if (getrandom(random, sizeof(random), 0) != sizeof(random)) {
		out->failed = true;
		return;
	}
	hex_write(random, sizeof(random), nonce);
	for (; (next = strstr(at, mark)); at = next + strlen(mark)) {
		text_put(out, at, (size_t)(next - at));
		text_puts(out, nonce);
	}
	text_puts(out, at);
}
